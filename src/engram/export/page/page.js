import {
  announce, by, cardTitle, count, describeModel, make, percent, placeOver, resultNodes, setBusy, showImage, showProblem, takeImages,
} from "./image_page.js";
import { evaluationBox } from "./preprocess.js";

const seconds = (from) => `${((performance.now() - from) / 1000).toFixed(2)} s`;
const megabytes = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

const state = { site: null, images: 0, ready: null, first: null };

// The worker with the model

const worker = { waiting: new Map(), number: 0, thread: null };

function call(name, given, transfer = []) {
  const id = ++worker.number;
  worker.thread.postMessage({ id, call: name, given }, transfer);
  return new Promise((resolve, reject) => worker.waiting.set(id, { resolve, reject }));
}

function startWorker() {
  worker.thread = new Worker("worker.js", { type: "module" });
  worker.thread.addEventListener("message", ({ data }) => {
    if (data.loaded) return announce(`Loading the model: ${percent(data.loaded / state.site.bytes)} of ${megabytes(state.site.bytes)}`);
    const { resolve, reject } = worker.waiting.get(data.id);
    worker.waiting.delete(data.id);
    return data.problem ? reject(new Error(data.problem)) : resolve(data.result);
  });
  worker.thread.addEventListener("error", () => showProblem("This browser cannot run the model: it needs module workers and WebAssembly."));
}

// A service worker keeps all files, so that the page works without a network from then on.
async function keepFiles() {
  if (!("serviceWorker" in navigator) || !window.isSecureContext) return false;
  try {
    await navigator.serviceWorker.register("sw.js");
    await navigator.serviceWorker.ready;
    if (!navigator.serviceWorker.controller)
      await new Promise((resolve) => {
        navigator.serviceWorker.addEventListener("controllerchange", resolve, { once: true });
        setTimeout(resolve, 3000);
      });
    return Boolean(navigator.serviceWorker.controller);
  } catch {
    return false; // a private window, for example
  }
}

async function start() {
  announce("Loading…");
  const kept = await keepFiles();
  const response = await fetch("model.json");
  if (!response.ok) throw new Error(`model.json cannot be loaded (${response.status}).`);
  state.site = await response.json();
  const { about, bytes } = state.site;
  describeModel(about.backbone.source, taskNames().length, `The model: ${megabytes(bytes)}, ${about.precision}.`);
  drawCards();
  startWorker();
  const began = performance.now();
  const { provider, threads } = await call("load", state.site);
  const where = provider === "webgpu" ? "WebGPU" : `WebAssembly, ${threads === 1 ? "one thread" : `${threads} threads`}`;
  announce(`Ready in ${seconds(began)} (${where}). ${kept ? "It works without a network from now on." : ""}`);
  document.body.dataset.ready = "true";
}

// Tasks first, and the backbone's own classes last.
function taskNames() {
  const known = Object.entries(state.site.about.tasks).filter(([, task]) => task.kind !== "embedding");
  return known.sort(([, a], [, b]) => Number(!a.regime) - Number(!b.regime)).map(([name]) => name);
}

// Images

async function choose(file) {
  const number = ++state.images;
  const began = performance.now();
  showProblem("");
  try {
    // The bytes of the file as they are: no colour profile, as in training.
    const bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none" }).catch(() => {
      throw new Error(`${file.name || "The file"} is not an image that this browser can read.`);
    });
    const { width, height } = bitmap;
    showImage(file);
    by("mask").hidden = true;
    await state.ready;
    placeOver(by("mask"), evaluationBox(width, height, state.site.about.preprocessing), width, height);
    const data = pixelsOf(bitmap);
    bitmap.close();
    setBusy(true);
    const result = await call("predict", { data, width, height }, [data.buffer]);
    if (number !== state.images) return; // another image was chosen meanwhile
    drawCards(result.tasks);
    state.first ??= seconds(began);
    by("caption").textContent = `${file.name || "pasted"}, ${width} × ${height}`;
    announce(`Answered in ${seconds(began)}; the first answer took ${state.first}. The image stayed on this device.`);
    document.body.dataset.answered = String(number);
  } catch (problem) {
    if (number === state.images) showProblem(problem.message);
  } finally {
    if (number === state.images) setBusy(false);
  }
}

// RGBA over white. A canvas copies pixels in strips: some browsers limit its size.
function pixelsOf(bitmap) {
  const { width, height } = bitmap;
  const rows = Math.max(1, Math.min(height, Math.floor(4e6 / width)));
  const canvas = make("canvas", { width, height: rows });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const data = new Uint8ClampedArray(4 * width * height);
  for (let y = 0; y < height; y += rows) {
    const high = Math.min(rows, height - y);
    context.fillStyle = "#fff";
    context.fillRect(0, 0, width, high);
    context.drawImage(bitmap, 0, y, width, high, 0, 0, width, high);
    data.set(context.getImageData(0, 0, width, high).data, 4 * width * y);
  }
  return data;
}

takeImages(choose);

// Answers, one card per task

function drawCards(results = {}) {
  by("cards").replaceChildren(...taskNames().map((name) => card(name, results[name])));
  const pictures = Object.values(results).filter((result) => result.answer?.overlay);
  if (pictures.length) drawOver(pictures[0].answer);
}

function card(name, result) {
  const task = state.site.about.tasks[name];
  const [one, many] = task.kind === "regression" ? ["number", "numbers"] : ["class", "classes"];
  const facts = task.kind === "anomaly" ? [] : [count(task.classes.length, one, many)];
  if (task.kind !== "classification") facts.push(task.kind);
  const node = make("article", { className: "card" }, cardTitle(name, facts));
  node.dataset.task = name;
  node.classList.toggle("base", !task.regime);
  if (result) node.append(...resultNodes(name, result));
  if (result?.answer?.overlay) {
    const button = make("button", { type: "button", className: "plain", textContent: "Show it in the image" });
    button.addEventListener("click", () => drawOver(result.answer));
    node.append(button);
  }
  return node;
}

// A mask or a heat map, over the part of the image that the model saw.
function drawOver({ overlay, size: [height, width] }) {
  const canvas = Object.assign(by("mask"), { width, height, hidden: false });
  canvas.getContext("2d").putImageData(new ImageData(overlay, width, height), 0, 0);
}

state.ready = start();
state.ready.catch((problem) => showProblem(problem.message));
