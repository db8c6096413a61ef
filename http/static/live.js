import { complaint, headers } from "./sse.js";

const EVERY_MS = 500;
const SECONDS = 60;
const SHOWN_STEPS = 8;
const PHASES = ["schedule", "launch", "sample", "await", "commit", "send"];
const at = (id) => document.getElementById(id);
const rates = []; // [when, tokens a second]
let before = null;
let latest = null;

const tell = (id, text) => { at(id).textContent = text; };
const ms = (seconds) => (seconds * 1000 < 10 ? (seconds * 1000).toFixed(2) : (seconds * 1000).toFixed(1));
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

async function look() {
  try {
    const response = await fetch("live", { headers: headers() });
    if (!response.ok) throw new Error(await complaint(response));
    show(await response.json());
    at("live-note").hidden = true;
  } catch (error) {
    const isGone = error instanceof TypeError;
    at("state").dataset.state = isGone ? "gone" : "unknown";
    tell("state-text", isGone ? "not reachable" : "no access");
    tell("live-note", isGone ? "The server does not answer." : error.message);
    at("live-note").hidden = false;
  }
}

function show(now) {
  at("state").dataset.state = now.state;
  tell("state-text", now.state);
  tell("model", now.model);
  at("model").title = now.model;
  latest = now;
  const stats = now.stats;
  if (stats === null) return; // still starting
  tell("running", stats.num_running);
  tell("waiting", stats.num_waiting);
  if (before?.stats && now.at_s > before.at_s && stats.num_output_tokens >= before.stats.num_output_tokens) {
    const rate = (stats.num_output_tokens - before.stats.num_output_tokens) / (now.at_s - before.at_s);
    rates.push([now.at_s, rate]);
    tell("rate", rate < 100 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en"));
  }
  while (rates.length && rates[0][0] < now.at_s - SECONDS) rates.shift();
  const frames = before ? now.socket_gaps.count - before.socket_gaps.count : 0;
  if (frames > 0) tell("socket", `${ms((now.socket_gaps.sum_s - before.socket_gaps.sum_s) / frames)} ms a frame`);
  before = now;
  const step = median(now.step_s);
  tell("gap", step === null ? "–" : ms(step));
  const host = median(now.host_s);
  tell("host", host === null ? "–" : `${ms(host)} ms of ${ms(step)}`);
  const held = stats.num_pages - stats.num_free_pages - stats.num_cached_pages;
  at("pages-meter").value = stats.num_pages ? held / stats.num_pages : 0;
  tell("pages", `${held.toLocaleString("en")} of ${stats.num_pages.toLocaleString("en")}`);
  const cached = stats.num_prompt_tokens ? stats.num_cached_tokens / stats.num_prompt_tokens : 0;
  tell("cache", `${(cached * 100).toFixed(0)} % of prompt tokens`);
  tell("steps", [stats.num_steps, stats.num_drains, stats.num_retractions].map((n) => n.toLocaleString("en")).join(" · "));
  draw();
}

/** A canvas's context, cleared, in CSS pixels; null while it is not on screen. */
function cleared(id) {
  const canvas = at(id);
  const [width, height] = [canvas.clientWidth, Number(canvas.getAttribute("height-css") ?? canvas.getAttribute("height"))];
  if (!width) return null;
  canvas.setAttribute("height-css", height);
  canvas.style.height = `${height}px`;
  canvas.width = width * devicePixelRatio;
  canvas.height = height * devicePixelRatio;
  const pen = canvas.getContext("2d");
  pen.scale(devicePixelRatio, devicePixelRatio);
  pen.font = "10px system-ui, sans-serif";
  return { pen, width, height };
}

function draw() {
  drawRates();
  drawTimeline();
}

function drawRates() {
  const canvas = cleared("rates");
  if (!canvas || !latest) return;
  const { pen, width, height } = canvas;
  const most = Math.max(1, ...rates.map(([, rate]) => rate));
  const x = (when) => width - ((latest.at_s - when) / SECONDS) * width;
  const y = (rate) => height - 2 - (rate / most) * (height - 16);
  pen.fillStyle = colour("dim");
  pen.fillText(`${Math.round(most).toLocaleString("en")}`, 2, 10);
  if (rates.length < 2) return;
  pen.beginPath();
  rates.forEach(([when, rate], index) => (index ? pen.lineTo(x(when), y(rate)) : pen.moveTo(x(when), y(rate))));
  pen.strokeStyle = colour("accent");
  pen.lineWidth = 1.8;
  pen.stroke();
  pen.lineTo(width, height);
  pen.lineTo(x(rates[0][0]), height);
  pen.globalAlpha = 0.15;
  pen.fillStyle = colour("accent");
  pen.fill();
  pen.globalAlpha = 1;
}

/** The loop's phases above; below, each step from its launch until its results were home, in turn on two rows. */
function drawTimeline() {
  const canvas = cleared("timeline");
  if (!canvas || !latest?.ranges.length) return;
  const { pen, width, height } = canvas;
  const newest = Math.max(...latest.ranges.map(([, step]) => step));
  const ranges = latest.ranges.filter(([, step]) => step > newest - SHOWN_STEPS);
  const begin = Math.min(...ranges.map(([, , start]) => start));
  const end = Math.max(...ranges.map(([, , , stop]) => stop));
  const x = (when) => ((when - begin) / Math.max(end - begin, 1)) * width;
  const bar = (from, to, top, tall, fill) => {
    pen.fillStyle = colour(fill);
    pen.fillRect(x(from), top, Math.max(x(to) - x(from) - 0.5, 0.8), tall);
  };
  pen.fillStyle = colour("dim");
  pen.fillText("loop", 2, 10);
  pen.fillText("in flight", 2, 56);
  const launched = new Map();
  for (const [name, step, start, stop] of ranges) {
    if (PHASES.includes(name)) bar(start, stop, 14, 26, name);
    if (name === "launch") launched.set(step, start);
    if (name === "await" && launched.has(step)) {
      bar(launched.get(step), stop, step % 2 ? 86 : 60, 22, step % 2 ? "odd" : "even");
      pen.fillStyle = colour("card");
      if (x(stop) - x(launched.get(step)) > 34) pen.fillText(`${step}`, x(launched.get(step)) + 4, step % 2 ? 100 : 74);
    }
  }
  tell("span", `${((end - begin) / 1000).toFixed(1)} ms`);
}

at("legend").replaceChildren(...PHASES.map((name) => {
  const entry = document.createElement("span");
  const swatch = entry.appendChild(document.createElement("i"));
  swatch.className = name;
  entry.append(name);
  return entry;
}));
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

async function watch() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}
watch();
