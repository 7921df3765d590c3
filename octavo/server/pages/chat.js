// The chat page: one conversation in this tab, kept nowhere else.

import { ApiError, address, chat, models } from "./api.js";
import { AnswerView, UserView, copy } from "./message.js";
import { KEY_VARIABLE, asCurl, asPython } from "./snippets.js";

const at = (id) => document.getElementById(id);
const prompt = at("prompt");
const fields = [...document.querySelectorAll("[data-field]")];
const kept = [...fields, at("system"), at("stop-strings"), at("key")];
const SHORT_WAIT = 1500; // milliseconds between two looks at a server that is loading

let turns = []; // {role, content}: what the next request tells the model
let connected = false;
let nextLook = 0; // timer of the next try to connect
let running = null; // AbortController of the answer that is being written

// ---- settings: in this tab only ----

function nameOf(input) {
  return `octavo.${input.dataset.field ?? input.id}`;
}

function restore() {
  for (const input of kept) input.value = sessionStorage.getItem(nameOf(input)) ?? "";
}

function keep(event) {
  if (kept.includes(event.target)) sessionStorage.setItem(nameOf(event.target), event.target.value);
}

function sampling() {
  const chosen = {};
  for (const input of fields) {
    if (input.value !== "" && Number.isFinite(input.valueAsNumber)) chosen[input.dataset.field] = input.valueAsNumber;
  }
  const stops = at("stop-strings").value.split("\n").filter(Boolean);
  if (stops.length) chosen.stop = stops;
  return chosen;
}

function requestBody(conversation) {
  const system = at("system").value.trim();
  return {
    model: at("model").value,
    messages: system ? [{ role: "system", content: system }, ...conversation] : conversation,
    ...sampling(),
    stream: true,
    stream_options: { include_usage: true },
  };
}

// ---- the server ----

async function connect() {
  const select = at("model");
  clearTimeout(nextLook);
  try {
    const names = await models(at("key").value);
    const before = select.value;
    select.replaceChildren(...names.map((name) => new Option(shortened(name), name)));
    select.title = names.join("\n");
    if (names.includes(before)) select.value = before;
    select.disabled = names.length < 2;
    report("ready", "");
  } catch (error) {
    if (error.status === 401 || error.status === 403) {
      report("broken", error.status === 401 ? "an API key is needed" : "this API key may not chat");
      if (!at("settings").open) openSettings(at("key"));
      return;
    }
    report("waiting", error.status === 503 ? "the model is loading …" : "the server does not answer …");
    nextLook = setTimeout(connect, SHORT_WAIT);
  }
}

/** A path's last two parts; other names as they are. */
function shortened(name) {
  return name.startsWith("/") ? name.split("/").slice(-2).join("/") : name;
}

function report(state, label) {
  at("light").dataset.state = state;
  if (label) at("model").replaceChildren(new Option(label));
  if (label) at("model").disabled = true;
  connected = state === "ready";
  refreshSend();
}

// ---- a turn ----

function refreshSend() {
  at("send").disabled = !connected || running !== null || !prompt.value.trim();
}

function setRunning(controller) {
  running = controller;
  at("send").hidden = controller !== null;
  at("stop").hidden = controller === null;
  refreshSend();
}

function tell(news) {
  at("news").textContent = news;
}

function nearEnd() {
  const box = at("scroller");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 80;
}

function toEnd() {
  at("scroller").scrollTop = at("scroller").scrollHeight;
}

function ask(text) {
  at("welcome").hidden = true;
  turns.push({ role: "user", content: text });
  at("log").append(new UserView(text).root);
  answer();
}

async function answer() {
  const conversation = [...turns];
  const view = new AnswerView();
  const controller = new AbortController();
  const said = { text: "", reasoning: "" };
  const seen = { began: performance.now(), first: 0, chunks: 0, reason: "", timings: null, usage: null };
  let failure = "";
  let frame = 0;
  at("log").append(view.root);
  toEnd();
  setRunning(controller);
  tell("The answer is being written.");
  const draw = () => {
    frame = 0;
    const follow = nearEnd();
    view.show(said);
    if (follow) toEnd();
  };
  try {
    for await (const event of chat(requestBody(conversation), at("key").value, controller.signal)) {
      if (controller.signal.aborted) break;
      take(event, said, seen);
      frame ||= requestAnimationFrame(draw);
    }
  } catch (error) {
    if (error.name === "AbortError") seen.reason = "stopped";
    else failure = error instanceof ApiError ? error.message : `This page failed: ${error.message}`;
    if (error.status === 401) openSettings(at("key"));
  }
  cancelAnimationFrame(frame);
  draw();
  const follow = nearEnd();
  if (view.root.isConnected) {
    // A question without an answer is left out of the next request: turns alternate.
    if (said.text) turns.push({ role: "assistant", content: said.text });
    else turns.pop();
  }
  view.end({ text: said.text, facts: factsOf(seen), failure, again: () => retry(view, conversation) });
  if (follow) toEnd();
  if (running === controller) {
    setRunning(null);
    tell(failure ? "" : seen.reason === "stopped" ? "The answer was stopped." : "The answer is complete.");
  }
}

function take(event, said, seen) {
  for (const choice of event.choices) {
    const delta = choice.delta ?? {};
    const text = delta.content ?? "";
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (text || reasoning) {
      seen.first ||= performance.now();
      seen.chunks += 1;
    }
    said.text += text;
    said.reasoning += reasoning;
    seen.reason = choice.finish_reason ?? seen.reason;
  }
  seen.timings = event.timings ?? seen.timings;
  seen.usage = event.usage ?? seen.usage;
}

/** What is told below an answer: the server's figures, or the page's own where it was stopped. */
function factsOf({ began, first, chunks, reason, timings, usage }) {
  const facts = [];
  const wait = timings?.first_token_seconds ?? (first ? (first - began) / 1000 : null);
  const span = (performance.now() - first) / 1000;
  const speed = timings ? timings.tokens_per_second : chunks > 1 && span > 0 ? (chunks - 1) / span : null;
  if (wait !== null) facts.push(`first token ${wait < 1 ? `${Math.round(wait * 1000)} ms` : `${wait.toFixed(1)} s`}`);
  if (speed) facts.push(`${speed < 10 ? speed.toFixed(1) : Math.round(speed)} tokens/s`);
  if (usage) facts.push(`${usage.completion_tokens} tokens`);
  if (reason === "length") facts.push("cut at the token limit");
  if (reason === "stopped") facts.push("stopped");
  return facts;
}

/** Forgets an answer and what came after it, and asks again. */
function retry(view, conversation) {
  running?.abort();
  while (view.root.nextSibling) view.root.nextSibling.remove();
  view.root.remove();
  turns = [...conversation];
  answer();
  prompt.focus();
}

function newChat() {
  running?.abort();
  setRunning(null);
  turns = [];
  at("log").replaceChildren();
  at("welcome").hidden = false;
  tell("A new conversation.");
  prompt.focus();
}

// ---- the message field ----

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${prompt.scrollHeight}px`;
  refreshSend();
}

function submit(event) {
  event?.preventDefault();
  const text = prompt.value.trim();
  if (!text || running || !connected) return;
  prompt.value = "";
  grow();
  ask(text);
}

prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
});
at("composer").addEventListener("submit", submit);
at("stop").addEventListener("click", () => {
  running?.abort();
  prompt.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.abort();
});
for (const start of document.querySelectorAll(".start")) {
  start.addEventListener("click", () => {
    prompt.value = start.textContent;
    grow();
    prompt.focus();
  });
}
at("new-chat").addEventListener("click", newChat);

// ---- drawers ----

function openSettings(first) {
  at("settings").showModal();
  first?.focus();
}

function showRequest() {
  const asked = turns.at(-1)?.role === "assistant" ? turns.slice(0, -1) : turns;
  const pending = prompt.value.trim() || (turns.length ? "" : "Hello!");
  // While an answer is written, or where nothing is in the field, the request is the last one.
  const conversation = running || !pending ? asked : [...turns, { role: "user", content: pending }];
  const body = requestBody(conversation);
  const withKey = at("key").value !== "";
  at("curl").textContent = asCurl(address("v1/chat/completions"), body, withKey);
  at("python").textContent = asPython(address("v1"), body, withKey);
  at("request-note").textContent = withKey
    ? `The key is read from $${KEY_VARIABLE}.`
    : "The conversation with the message in the field, or else the last request, with the settings.";
  at("request").showModal();
}

at("open-settings").addEventListener("click", () => openSettings(at("system")));
at("open-request").addEventListener("click", showRequest);
at("settings").addEventListener("input", keep);
at("settings").addEventListener("close", () => {
  if (!connected) connect();
});
at("key").addEventListener("change", connect);
at("reset").addEventListener("click", () => {
  for (const input of kept) if (input !== at("key")) input.value = "";
  for (const input of kept) sessionStorage.setItem(nameOf(input), input.value);
});
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", () => copy(at(button.dataset.copies).textContent, button));
}
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => { // on the backdrop
    if (event.target === dialog) dialog.close();
  });
}

restore();
connect();
