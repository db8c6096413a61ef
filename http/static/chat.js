import { complaint, eventsOf, headers } from "./sse.js";

const at = (selector) => document.querySelector(selector);
const [list, form, box, sampling] = ["#messages", "#composer", "#prompt", "#sampling"].map(at);
const conversation = [];
let running = null; // the AbortController of the answer under way

const NUMBERS = ["temperature", "top_p", "min_p", "top_k", "max_tokens", "seed", "frequency_penalty", "presence_penalty"];
const IDLE = { temperature: "1", top_p: "1", min_p: "0" }; // what asks for nothing is not sent

function asked(text) {
  const fields = Object.fromEntries(new FormData(sampling));
  const body = { stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) {
    if (fields[name] !== "" && fields[name] !== IDLE[name]) body[name] = Number(fields[name]);
  }
  if (fields.stop) body.stop = [fields.stop];
  if (fields.mode === "completion") return ["v1/completions", { max_tokens: 256, ...body, prompt: text }];
  const system = fields.system ? [{ role: "system", content: fields.system }] : [];
  return ["v1/chat/completions", { ...body, messages: [...system, ...conversation] }];
}

function add(role, text) {
  at("#empty").hidden = true;
  const message = document.createElement("div");
  message.className = `message ${role}`;
  const body = message.appendChild(document.createElement("div"));
  body.className = "body";
  body.textContent = text;
  list.append(message);
  list.scrollTop = list.scrollHeight;
  return message;
}

/** Fenced code becomes blocks. Only text nodes are made: nothing that a model writes is ever markup. */
function dress(body) {
  const parts = body.textContent.split(/```[^\n]*\n?/);
  if (parts.length < 3) return;
  body.replaceChildren(...parts.map((part, index) => {
    if (index % 2 === 0) return document.createTextNode(part.trim());
    const block = document.createElement("pre");
    block.textContent = part.trimEnd();
    return block;
  }));
}

function busy(controller) {
  running = controller;
  at("#send").hidden = controller !== null;
  at("#stop").hidden = controller === null;
}

async function ask(text) {
  conversation.push({ role: "user", content: text });
  add("user", text);
  const message = add("assistant running", "");
  const body = message.querySelector(".body");
  const controller = new AbortController();
  busy(controller);
  const answer = { text: "", usage: null, reason: null, start: performance.now(), first: null, last: null };
  try {
    await stream(text, answer, body, controller.signal);
    if (!answer.text) body.textContent = "(nothing)";
  } catch (error) {
    if (error.name !== "AbortError") {
      message.classList.add("failed");
      body.textContent = answer.text ? `${answer.text}\n\n${error.message}` : error.message;
    } else answer.reason = "stopped";
  }
  busy(null);
  message.classList.remove("running");
  if (message.classList.contains("failed") && !answer.text) conversation.pop(); // it was never answered
  else conversation.push({ role: "assistant", content: answer.text });
  dress(body);
  message.append(facts(answer));
}

async function stream(text, answer, body, signal) {
  const [path, fields] = asked(text);
  const response = await fetch(path, { method: "POST", headers: headers(), body: JSON.stringify(fields), signal });
  if (!response.ok) throw new Error(await complaint(response));
  for await (const data of eventsOf(response)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    answer.usage = chunk.usage ?? answer.usage;
    const choice = chunk.choices[0];
    const piece = choice?.delta?.content ?? choice?.text ?? "";
    answer.reason = choice?.finish_reason ?? answer.reason;
    if (!piece) continue;
    answer.last = performance.now();
    answer.first ??= answer.last;
    answer.text += piece;
    const follows = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    body.append(piece);
    if (follows) list.scrollTop = list.scrollHeight;
  }
  throw new Error("the connection was cut");
}

function facts(answer) {
  const line = document.createElement("div");
  line.className = "facts";
  const told = [];
  if (answer.first !== null) told.push(`first token ${(answer.first - answer.start).toFixed(0)} ms`);
  const count = answer.usage?.completion_tokens;
  if (count > 1 && answer.last > answer.first) {
    told.push(`${(((count - 1) * 1000) / (answer.last - answer.first)).toFixed(1)} tokens/s`);
  }
  if (count !== undefined) told.push(`${count} tokens`);
  if (answer.reason) told.push(answer.reason);
  line.textContent = told.join(" · ");
  return line;
}

function grow() {
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const text = box.value.trim();
  if (!text || running) return;
  box.value = "";
  grow();
  ask(text);
});
box.addEventListener("input", grow);
box.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});
at("#stop").addEventListener("click", () => running?.abort());
at("#clear").addEventListener("click", () => {
  running?.abort();
  conversation.length = 0;
  list.querySelectorAll(".message").forEach((message) => message.remove());
  at("#empty").hidden = false;
});
for (const idea of document.querySelectorAll(".ideas button")) {
  idea.addEventListener("click", () => running || ask(idea.textContent));
}
for (const slider of sampling.querySelectorAll("input[type=range]")) {
  const show = () => { slider.parentElement.querySelector("output").textContent = slider.value; };
  slider.addEventListener("input", show);
  show(); // the browser may have kept another value over a reload
}
sampling.addEventListener("submit", (event) => event.preventDefault());
for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.show;
    for (const other of document.querySelectorAll("[data-show]")) {
      other.setAttribute("aria-pressed", String(other === button));
    }
    window.dispatchEvent(new Event("resize"));
  });
}
at("#theme").addEventListener("click", () => {
  const root = document.documentElement;
  const isDark = (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = isDark ? "light" : "dark";
  window.dispatchEvent(new Event("resize"));
});
