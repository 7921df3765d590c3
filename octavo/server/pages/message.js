// Messages as elements. What a model writes goes in as text, never as HTML.

export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Only secure pages have a clipboard; the old way needs a selected field in the same dialog.
    const field = element("textarea");
    field.value = text;
    (button.closest("dialog") ?? document.body).append(field);
    field.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not allowed here";
    field.remove();
    button.focus();
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

/** [{language, text}] with language null outside of ``` fences; a fence may still be open. */
export function blocks(text) {
  const found = [{ language: null, lines: [] }];
  for (const line of text.split("\n")) {
    const last = found.at(-1);
    const fence = /^\s{0,3}```\s*([\w+#.-]*)\s*$/.exec(line);
    if (last.language === null && fence) {
      found.push({ language: fence[1], lines: [] });
    } else if (last.language !== null && /^\s{0,3}```\s*$/.test(line)) {
      found.push({ language: null, lines: [] });
    } else {
      last.lines.push(line);
    }
  }
  return found
    .map(({ language, lines }) => ({ language, text: lines.join("\n") }))
    .filter(({ language, text: own }) => language !== null || own.trim());
}

/** `code` and **strong** of a paragraph as elements, all else as text. */
function inline(text) {
  const parts = text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/);
  return parts.filter(Boolean).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return element("code", "", part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return element("strong", "", part.slice(2, -2));
    return document.createTextNode(part);
  });
}

function codeBlock(language) {
  const block = element("div", "block");
  const head = element("div", "block-head");
  const button = element("button", "copy", "Copy");
  button.type = "button";
  const pre = element("pre");
  const code = element("code");
  button.addEventListener("click", () => copy(code.textContent, button));
  head.append(element("span", "", language || "code"), button);
  pre.tabIndex = 0;
  pre.append(code);
  block.append(head, pre);
  return block;
}

/** Shows `text` in `body`, changing only what is not there yet: it is called for each frame. */
function fill(body, text) {
  const wanted = blocks(text);
  wanted.forEach(({ language, text: own }, index) => {
    let node = body.children[index];
    const kind = language === null ? "text" : "block";
    if (node?.dataset.kind !== kind) {
      const made = language === null ? element("div", "text") : codeBlock(language);
      made.dataset.kind = kind;
      if (node) node.replaceWith(made); else body.append(made);
      node = made;
    }
    if (node.dataset.length === String(own.length) && index < wanted.length - 1) return;
    node.dataset.length = own.length;
    if (language !== null) node.querySelector("code").textContent = own;
    else node.replaceChildren(...inline(own.replace(/^\n+|\n+$/g, "")));
  });
  while (body.children.length > wanted.length) body.lastChild.remove();
}

export class UserView {
  constructor(text) {
    this.root = element("article", "message user");
    this.root.append(element("h3", "hidden", "You"), element("div", "text", text));
  }
}

/** An answer while it is written, and after. */
export class AnswerView {
  constructor() {
    this.root = element("article", "message assistant writing");
    this.body = element("div", "body waiting");
    this.below = element("div", "below");
    this.root.append(element("h3", "hidden", "Assistant"), this.body, this.below);
  }

  show({ text, reasoning }) {
    if (reasoning && !this.thinking) {
      this.thinking = element("details", "thinking");
      this.thoughts = element("div", "text");
      this.thinking.append(element("summary", "", "Thoughts"), this.thoughts);
      this.body.before(this.thinking);
    }
    if (reasoning) this.thoughts.textContent = reasoning;
    this.body.classList.toggle("waiting", !text);
    fill(this.body, text);
  }

  end({ text, facts, failure, again }) {
    this.root.classList.remove("writing");
    this.body.classList.remove("waiting");
    if (failure) {
      const shown = element("div", "failure", failure);
      shown.setAttribute("role", "alert");
      this.body.after(shown);
    }
    if (text) {
      const button = element("button", "", "Copy");
      button.type = "button";
      button.addEventListener("click", () => copy(text, button));
      this.below.append(button);
    }
    const retry = element("button", "again", "Try again");
    retry.type = "button";
    retry.addEventListener("click", again);
    this.below.append(retry, ...facts.map((fact) => element("span", "fact", fact)));
  }
}
