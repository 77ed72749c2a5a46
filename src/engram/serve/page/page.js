import {
  announce, answerRow, by, cardTitle, count, describeModel, isUnfamiliar, make, percent, placeOver, resultNodes, rowsOf,
  setBusy, showImage, showProblem, takeImages,
} from "./image_page.js";

export const state = {
  list: null, // the response of /v1/tasks
  etag: "",
  file: null,
  image: null, // the response about the file
  off: new Set(),
  attention: null, // the task whose attention is shown
  requests: 0, // so far: late responses to old requests are dropped
  offline: false,
  token: "", // kept here only: it is gone when the page is closed
  locked: false, // the service wants a token, and the person has not given it yet
};

// Requests to the service

export async function call(path, options = {}) {
  let response;
  const headers = { ...options.headers, ...(state.token ? { Authorization: `Bearer ${state.token}` } : {}) };
  try {
    response = await fetch(path, { ...options, headers });
  } catch {
    throw new Error("The service does not answer. Is it still running?");
  }
  if (response.status === 304) return null;
  if (response.ok && options.binary) return { body: await response.arrayBuffer() };
  const body = await response.json().catch(() => ({}));
  if (response.status === 401) {
    const sentence = state.token ? "The token is wrong. Enter another." : "Enter the token of this service to ask it.";
    askForToken();
    throw new Error(sentence);
  }
  if (response.status === 421) throw new Error(`${body.error} Or open this page under another name.`);
  if (!response.ok) throw new Error(body.error || `The service answered with status ${response.status}.`);
  return { body, etag: response.headers.get("etag") || "" };
}

function askForToken() {
  state.locked = true;
  state.token = "";
  by("unlock").hidden = false;
  by("token").focus();
}

by("unlock").addEventListener("submit", async (event) => {
  event.preventDefault();
  state.token = by("token").value.trim();
  state.locked = false;
  by("token").value = "";
  by("unlock").hidden = true;
  showProblem("");
  await refresh();
  if (!state.locked && state.file) await predict();
});

export async function refresh() {
  if (state.locked) return;
  try {
    const response = await call("v1/tasks", { headers: { "If-None-Match": state.etag }, cache: "no-store" });
    if (state.offline) {
      state.offline = false;
      showProblem("");
    }
    if (!response || response.body.tag === state.list?.tag) return;
    await update(response);
  } catch (problem) {
    state.offline = true;
    showProblem(problem.message);
  }
}

async function update({ body, etag }) {
  const before = state.list && new Map(state.list.tasks.map((task) => [task.name, task.content]));
  state.list = body;
  state.etag = etag;
  const now = new Map(state.list.tasks.map((task) => [task.name, task.content]));
  const attached = before ? [...now.keys()].filter((name) => before.get(name) !== now.get(name)) : [];
  const removed = before ? [...before.keys()].filter((name) => !now.has(name)) : [];
  if (removed.includes(state.attention)) hideAttention();
  describeModel(state.list.backbone.source, state.list.tasks.length);
  drawCards(new Set(attached));
  if (attached.length && state.file) await predict(); // which announces something itself, so it comes first
  if (attached.length) announce(`Attached just now: ${attached.join(", ")}.`);
  else if (removed.length) announce(`Removed: ${removed.join(", ")}.`);
}

const taskNames = () => [
  ...(state.list.backbone.classes ? ["base"] : []),
  ...state.list.tasks.map((task) => task.name),
];

async function predict() {
  if (!state.file || !state.list) return;
  const wanted = taskNames().filter((name) => !state.off.has(name));
  const number = ++state.requests;
  if (!wanted.length) return;
  setBusy(true);
  const form = new FormData();
  form.append("image", state.file, state.file.name || "image");
  form.append("tasks", wanted.join(","));
  if (state.attention && wanted.includes(state.attention)) form.append("attention", state.attention);
  try {
    const { body } = await call("v1/predict", { method: "POST", body: form });
    if (number === state.requests) showAnswers(body.images[0], wanted);
  } catch (problem) {
    if (number !== state.requests) return;
    if (form.has("attention")) {
      hideAttention(); // perhaps the task has none; the answers do not depend on it
      if (!state.image) await predict();
    }
    showProblem(problem.message);
    announce("");
    if (/^There is no task/.test(problem.message)) await refresh();
  } finally {
    if (number === state.requests) setBusy(false);
  }
}

function showAnswers(image, names) {
  showProblem("");
  state.image = image;
  by("caption").textContent = `${image.name}, ${image.width} × ${image.height}`;
  drawCards();
  frameView();
  if (image.attention) showAttention();
  const summaries = names.map((name) => `${name}: ${summary(image.tasks[name])}`);
  if (!state.attention) announce(`Done. ${summaries.join("; ")}.`);
}

// Choosing an image

export function choose(file) {
  state.file = file;
  state.image = null;
  const attention = state.attention;
  hideAttention();
  state.attention = attention; // the next response shows it for the new image
  showProblem("");
  showImage(file);
  drawCards();
  announce("Running…");
  predict();
  document.dispatchEvent(new Event("image-chosen"));
}

takeImages(choose);

// Answers, one card per task

// The picture of an answer: a mask, or a heat map.
function pictureOf(task) {
  const { kind, answer } = state.image.tasks[task] ?? {};
  return kind === "anomaly" ? answer?.map : answer?.mask; // a list of classes has a method called map
}

function summary(result) {
  if (!result || result.error) return "no answer";
  const rows = rowsOf[result.kind](result.answer);
  const best = result.kind === "regression" ? rows : result.kind === "multilabel" ? rows.filter((row) => row.first) : rows.slice(0, 1);
  const words = best.map((row) => `${row.label} ${row.text}`).join(", ") || "none";
  return isUnfamiliar(result) ? `${words}, unfamiliar` : words;
}

function drawCards(fresh = new Set()) {
  if (!state.list) return;
  const focus = document.activeElement?.dataset?.key;
  const tasks = new Map(state.list.tasks.map((task) => [task.name, task]));
  by("cards").replaceChildren(...taskNames().map((name) => card(name, tasks.get(name), fresh.has(name))));
  by("hint").hidden = !by("cards").querySelector("button.answer");
  if (focus) document.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
}

function card(name, task, fresh) {
  const on = !state.off.has(name);
  const box = make("input", { type: "checkbox", className: "switch", checked: on });
  box.setAttribute("role", "switch");
  box.setAttribute("aria-label", `Run ${name}`);
  box.dataset.key = `switch ${name}`;
  box.addEventListener("change", () => turn(name, box.checked));
  const node = make(
    "article",
    { className: "card" },
    make("div", { className: "row" }, cardTitle(name, factsOf(task)), box),
  );
  node.dataset.task = name;
  node.classList.toggle("base", !task);
  node.classList.toggle("off", !on);
  node.classList.toggle("fresh", fresh);
  node.classList.toggle("chosen", attentionIsShown(name));
  const result = on && state.image?.tasks[name];
  if (result) node.append(...resultNodes(name, result, (one, place) => selectable(name, one, place)));
  return node;
}

function factsOf(task) {
  if (!task) return [count(state.list.backbone.classes, "class", "classes")];
  const { cells, rank, layers, bank } = task.settings;
  if (bank) return [`memory bank of ${count(bank, "patch", "patches")}`, task.kind];
  return [
    task.kind === "regression" ? count(task.classes, "number", "numbers") : count(task.classes, "class", "classes"),
    ...(rank ? [`side network of rank ${rank}`] : []),
    ...(layers ? [`reads ${count(layers, "layer", "layers")}`] : []),
    ...(cells ? [`${count(cells, "cell", "cells")} per layer`] : layers ? [] : [task.regime]),
    ...(task.extends.length ? [`extends ${task.extends.join(", ")}`] : []),
    ...(task.kind === "classification" ? [] : [task.kind]),
  ];
}

// A row that shows the attention of its task when it is selected.
function selectable(name, one, place) {
  const open = attentionIsShown(name);
  const row = answerRow(one, "button");
  row.append(by("hint").querySelector("svg").cloneNode(true));
  row.dataset.key = `answer ${name} ${place}`;
  row.setAttribute("aria-pressed", String(open && place === 0));
  row.setAttribute("aria-describedby", "hint");
  row.title = [one.about, `${open ? "hide" : "show"} the attention of ${name}`].filter(Boolean).join("; ");
  row.addEventListener("click", () => (open ? hideAttention(true) : requestAttention(name)));
  return row;
}

function turn(name, on) {
  if (on) state.off.delete(name);
  else state.off.add(name);
  if (!on && state.attention === name) hideAttention();
  drawCards();
  if (on) predict();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !by("attention").hidden) return hideAttention(true);
  if (!["ArrowDown", "ArrowUp"].includes(event.key) || !event.target.classList?.contains("answer")) return;
  const rows = [...document.querySelectorAll("button.answer")];
  const next = rows[rows.indexOf(event.target) + (event.key === "ArrowDown" ? 1 : -1)];
  if (next) {
    event.preventDefault();
    next.focus();
  }
});

// Attention of a class token

const attentionIsShown = (name) => state.attention === name && !by("attention").hidden;

async function requestAttention(name) {
  state.attention = name;
  announce(`Computing the attention of ${name}…`);
  await predict();
}

function hideAttention(redraw = false) {
  state.attention = null;
  if (state.image) delete state.image.attention;
  for (const id of ["attention", "heat", "mask", "seen"]) by(id).hidden = true;
  if (redraw) drawCards();
}

function showAttention() {
  const { task, parts, layers, pooled } = state.image.attention;
  const changed = by("attention").hidden || by("attention").dataset.task !== task;
  by("attention").hidden = false;
  by("attention").dataset.task = task;
  const pictureName = pictureOf(task) && (state.image.tasks[task].kind === "anomaly" ? "Heat map" : "Mask");
  by("attention-title").textContent = pictureName ? `${pictureName} and attention of ${task}` : `Attention of ${task}`;
  by("attention-words").textContent = attentionWords(task, layers, pooled, pictureName);
  by("layer").max = layers.length;
  if (changed) by("layer").value = 0;
  by("shares").replaceChildren(...layers.map((layer, index) => layerRow(layer, index, parts, pooled)));
  by("key").replaceChildren(
    ...parts.map((part, index) =>
      make("li", { hidden: !layers.some((layer) => layer.shares[index] > 0) },
        make("i", { className: `p${index}` }), part)),
  );
  drawCards();
  drawHeatmap();
  if (changed) by("stage").scrollIntoView({ block: "nearest" }); // on a phone it is far above
  announce(`${by("attention-title").textContent}. Press Escape to close.`);
}

function layerName(number, pooled) {
  return pooled ? "Pooled" : `Layer ${number}`;
}

// Of several layers, the last third shows best where an answer comes from.
const lastLayers = (layers) => layers.slice(-Math.ceil(layers.length / 3));

function lastLayersName(layers, pooled) {
  const several = lastLayers(layers).length;
  return several > 1 ? `Layers ${layers.length - several + 1}–${layers.length}` : layerName(layers.length, pooled);
}

function attentionWords(task, layers, pooled, pictureName) {
  if (pictureName === "Heat map")
    return "Bright areas are unlike every patch of the good images. Choose a layer to see what the ViT's class token reads.";
  if (task === "base") return "Bright areas contribute most to what the ViT's own class token reads.";
  if (pooled) return "Bright areas contribute most to what it pools of its side network for its answer.";
  const cells = layers.reduce((sum, layer) => sum + layer.shares[3], 0) / layers.length;
  const average = `On average, ${percent(cells)} of its attention goes to its cells.`;
  return pictureName
    ? `The mask has one colour per class. Choose a layer to see its attention. ${average}`
    : `Bright areas contribute most to what its class token reads. ${average}`;
}

function layerRow(layer, index, parts, pooled) {
  const bars = layer.shares.map((share, part) => {
    const bar = make("u", { className: `p${part}` });
    bar.style.setProperty("--share", share);
    return bar;
  });
  const row = make("button", { type: "button" },
    make("span", { textContent: layerName(index + 1, pooled) }),
    make("i", {}, ...bars),
    make("b", { textContent: percent(layer.shares[pooled ? 0 : 3]) })); // of patches, or of cells
  const shares = parts.map((part, i) => `${part} ${percent(layer.shares[i])}`);
  row.setAttribute("aria-label", `${layerName(index + 1, pooled)}: ${shares.join(", ")}`);
  row.addEventListener("click", () => {
    const slider = by("layer");
    slider.value = Number(slider.value) === index + 1 ? 0 : index + 1;
    drawHeatmap();
  });
  return row;
}

by("layer").addEventListener("input", () => drawHeatmap());
by("close").addEventListener("click", () => hideAttention(true));

function drawHeatmap() {
  if (!state.image?.attention) return;
  const { task, layers, pooled } = state.image.attention;
  const chosen = Number(by("layer").value);
  const mask = chosen ? null : pictureOf(task); // a layer shows attention instead
  const heat = state.image.tasks[task]?.kind === "anomaly";
  by("mask").alt = heat ? "The heat map, bright where the image is unlike good ones" : "The mask, one colour per class";
  by("mask").classList.toggle("blend", heat);
  const first = heat ? "Heat map" : "Mask";
  by("layer-name").textContent = chosen ? layerName(chosen, pooled) : mask ? first : lastLayersName(layers, pooled);
  by("mask").hidden = !mask;
  if (mask) by("mask").src = mask;
  by("layer").setAttribute("aria-valuetext", by("layer-name").textContent);
  [...by("shares").children].forEach((row, index) => row.setAttribute("aria-pressed", String(index + 1 === chosen)));
  const small = heatmap(chosen ? [layers[chosen - 1]] : lastLayers(layers));
  const canvas = by("heat");
  canvas.width = 24 * small.width;
  canvas.height = 24 * small.height;
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  canvas.hidden = Boolean(mask);
  canvas.dataset.layer = chosen;
}

// A canvas with one pixel per patch: transparent where a patch contributes most, dark elsewhere.
function heatmap(layers) {
  const rows = layers[0].patches.length;
  const columns = layers[0].patches[0].length;
  const values = new Float64Array(rows * columns);
  for (const layer of layers)
    layer.patches.forEach((row, r) => row.forEach((value, c) => (values[r * columns + c] += value)));
  const largest = Math.max(...values) || 1;
  const canvas = make("canvas", { width: columns, height: rows });
  const pixels = canvas.getContext("2d").createImageData(columns, rows);
  values.forEach((value, i) => {
    const light = Math.sqrt(value / largest);
    pixels.data.set([24 + 60 * light, 12 + 20 * light, 48 + 70 * light, 215 * (1 - light) + 6], 4 * i);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

// Overlays cover the part of the image that the ViT sees.

function frameView() {
  const { view, width, height } = state.image;
  by("seen").hidden = !state.attention || (view[0] < 1 && view[1] < 1 && view[2] > width - 1 && view[3] > height - 1);
  placeOverlays();
}

function placeOverlays() {
  const { view, width, height } = state.image;
  for (const id of ["heat", "mask", "seen"]) placeOver(by(id), view, width, height);
}

// Tasks may be attached and removed while the page is open.

refresh();
setInterval(() => document.hidden || refresh(), 2000);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
