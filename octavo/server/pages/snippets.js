// A request as the text of programs.

export const KEY_VARIABLE = "OCTAVO_API_KEY";
const BY_CLIENT = new Set([
  "model", "messages", "stream", "stream_options", "temperature", "max_tokens", "top_p", "seed",
  "presence_penalty", "frequency_penalty", "stop",
]);

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function asCurl(url, body, withKey) {
  const lines = [`curl ${quoted(url)}`, "-H 'Content-Type: application/json'"];
  if (withKey) lines.push(`-H "Authorization: Bearer $${KEY_VARIABLE}"`);
  if (body.stream) lines[0] = lines[0].replace("curl", "curl -N");
  return [...lines, `-d ${quoted(JSON.stringify(body, null, 2))}`].join(" \\\n  ");
}

/** A JSON value as Python writes it. */
export function asLiteral(value, indent = "") {
  const inner = `${indent}    `;
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    const items = value.map((item) => `${inner}${asLiteral(item, inner)},\n`);
    return `[\n${items.join("")}${indent}]`;
  }
  if (typeof value === "object") {
    const pairs = Object.entries(value).map(([k, v]) => `${JSON.stringify(k)}: ${asLiteral(v, inner)}`);
    return `{${pairs.join(", ")}}`;
  }
  return JSON.stringify(value);
}

export function asPython(base, body, withKey) {
  const own = Object.entries(body).filter(([name]) => BY_CLIENT.has(name));
  const others = Object.fromEntries(Object.entries(body).filter(([name]) => !BY_CLIENT.has(name)));
  const named = own.map(([name, value]) => `    ${name}=${asLiteral(value, "    ")},\n`);
  if (Object.keys(others).length) named.push(`    extra_body=${asLiteral(others, "    ")},\n`);
  return [
    ...(withKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    "client = OpenAI(",
    `    base_url=${JSON.stringify(base)},`,
    `    api_key=${withKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"'},`,
    ")",
    `stream = client.chat.completions.create(\n${named.join("")})`,
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    '        print(choice.delta.content or "", end="", flush=True)',
    "print()",
    "",
  ].join("\n");
}
