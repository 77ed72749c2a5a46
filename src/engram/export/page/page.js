// Names of classes, tasks and files come from elsewhere, so they are only ever set as textContent.
import { evaluationBox } from "./preprocess.js";

const by = (id) => document.getElementById(id);
const make = (tag, settings = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), settings);
  node.append(...children);
  return node;
};
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
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
    if (data.loaded) return say(`Loading the model: ${percent(data.loaded / state.site.bytes)} of ${megabytes(state.site.bytes)}`);
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
  const kept = await keepFiles();
  const response = await fetch("model.json");
  if (!response.ok) throw new Error(`model.json cannot be loaded (${response.status}).`);
  state.site = await response.json();
  const { about, bytes } = state.site;
  const tasks = taskNames();
  const source = about.backbone.source.split("/").filter(Boolean).pop();
  by("about").textContent = `One ViT (${source}), ${tasks.length} ${tasks.length === 1 ? "task" : "tasks"}, one pass. The model: ${megabytes(bytes)}, ${about.precision}.`;
  drawCards();
  startWorker();
  const began = performance.now();
  const { provider, threads } = await call("load", state.site);
  const where = provider === "webgpu" ? "WebGPU" : `WebAssembly, ${threads === 1 ? "one thread" : `${threads} threads`}`;
  say(`Ready in ${seconds(began)} (${where}). ${kept ? "It works without a network from now on." : ""}`);
  document.body.dataset.ready = "true";
}

const say = (sentence) => (by("news").textContent = sentence);

function showProblem(sentence) {
  by("problem").textContent = sentence;
  by("problem").hidden = !sentence;
}

// Tasks first, and the backbone's own classes last.
function taskNames() {
  const known = Object.entries(state.site.about.tasks).filter(([, task]) => task.kind !== "embedding");
  return known.sort(([, a], [, b]) => Number(!a.regime) - Number(!b.regime)).map(([name]) => name);
}

// Images

async function chooseFrom(files) {
  const file = [...files].find((one) => one.type.startsWith("image/")) || files[0];
  if (!file) return;
  const number = ++state.images;
  const began = performance.now();
  showProblem("");
  try {
    // The bytes of the file as they are: no colour profile, as in training.
    const bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none" }).catch(() => {
      throw new Error(`${file.name || "The file"} is not an image that this browser can read.`);
    });
    show(file, bitmap);
    const { width, height } = bitmap;
    const data = pixelsOf(bitmap);
    bitmap.close();
    await state.ready;
    by("cards").setAttribute("aria-busy", "true");
    const result = await call("predict", { data, width, height }, [data.buffer]);
    if (number !== state.images) return; // another image was chosen meanwhile
    drawCards(result.tasks);
    state.first ??= seconds(began);
    by("caption").textContent = `${file.name || "pasted"}, ${width} × ${height}`;
    say(`Answered in ${seconds(began)}; the first answer took ${state.first}. The image stayed on this device.`);
    document.body.dataset.answered = String(number);
  } catch (problem) {
    if (number === state.images) showProblem(problem.message);
  } finally {
    if (number === state.images) by("cards").setAttribute("aria-busy", "false");
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

function show(file, bitmap) {
  const image = by("image");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.alt = `The chosen image: ${file.name || "pasted"}`;
  image.classList.toggle("small", Math.max(bitmap.width, bitmap.height) < 160);
  by("stage").style.setProperty("--aspect", bitmap.width / bitmap.height);
  by("mask").hidden = true;
  const [left, top, right, bottom] = evaluationBox(bitmap.width, bitmap.height, state.site.about.preprocessing);
  Object.assign(by("mask").style, {
    left: `${(100 * left) / bitmap.width}%`,
    top: `${(100 * top) / bitmap.height}%`,
    width: `${(100 * (right - left)) / bitmap.width}%`,
    height: `${(100 * (bottom - top)) / bitmap.height}%`,
  });
  by("figure").hidden = false;
  by("empty").hidden = true;
}

for (const [button, input] of [["choose", "file"], ["photograph", "camera"]]) {
  by(button).addEventListener("click", () => by(input).click());
  by(input).addEventListener("change", () => {
    chooseFrom(by(input).files);
    by(input).value = "";
  });
}
for (const kind of ["dragenter", "dragover"])
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    by("drop").classList.add("over");
  });
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) by("drop").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  by("drop").classList.remove("over");
  chooseFrom(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData?.files.length) chooseFrom(event.clipboardData.files);
});

// Answers, one card per task

const rowsOf = {
  classification: (answer) => answer.map((one, place) => ({ label: one.class, text: percent(one.probability), share: one.probability, first: !place })),
  multilabel: (answer) => answer.map((one) => ({ label: one.class, text: percent(one.probability), share: one.probability, first: one.present, mark: one.threshold })),
  regression: (answer) => answer.map((one) => ({ label: one.name, text: one.value.toLocaleString("en") })),
  segmentation: (answer) => answer.classes.map((one, place) => ({ label: one.class, text: percent(one.share), share: one.share, first: !place, colour: one.colour })),
  anomaly: (answer) => [{ label: answer.anomalous ? "anomalous" : "good", text: `${answer.score.toFixed(3)}, threshold ${answer.threshold.toFixed(3)}`, share: Math.min(1, answer.score / (2 * answer.threshold)), first: answer.anomalous, mark: 0.5 }],
};

function drawCards(results = {}) {
  by("cards").replaceChildren(...taskNames().map((name) => card(name, results[name])));
  const pictures = Object.values(results).filter((result) => result.answer?.overlay);
  if (pictures.length) drawOver(pictures[0].answer);
}

function card(name, result) {
  const task = state.site.about.tasks[name];
  const [one, many] = task.kind === "regression" ? ["number", "numbers"] : ["class", "classes"];
  const counted = `${task.classes.length.toLocaleString("en")} ${task.classes.length === 1 ? one : many}`;
  const facts = [counted, ...(task.regime ? [task.kind] : ["the ViT's own head"])];
  const node = make("article", { className: "card" }, make("h3", { textContent: name }), make("p", { className: "quiet", textContent: facts.join(" · ") }));
  node.dataset.task = name;
  if (!result) return node;
  if (result.error) return node.append(make("p", { className: "quiet", textContent: result.error })), node;
  node.append(...rowsOf[result.kind](result.answer).map(row));
  if (result.answer.overlay) {
    const button = make("button", { type: "button", className: "plain", textContent: "Show it in the image" });
    button.addEventListener("click", () => drawOver(result.answer));
    node.append(button);
  }
  if (result.familiarity !== null) {
    const strange = result.familiarity < 0;
    const number = result.familiarity.toFixed(2).replace("-", "−");
    const text = strange ? `Looks unlike what ${name} learned from: familiarity ${number}, where 1 is usual.` : `Familiarity ${number}, where 1 is usual.`;
    node.append(make("p", { className: strange ? "unfamiliar" : "quiet", textContent: text }));
  }
  return node;
}

function row(one) {
  const label = make("span", { textContent: one.label });
  const node = make("div", { className: "answer" }, label, make("b", { textContent: one.text }));
  node.classList.toggle("first", Boolean(one.first));
  node.style.setProperty("--share", one.share || 0);
  if (one.colour) {
    const swatch = make("i", { className: "swatch" });
    swatch.style.background = `rgb(${one.colour.join(" ")})`;
    label.prepend(swatch);
  }
  if (one.mark !== undefined) {
    node.append(make("i", { className: "mark", title: "from here on it is present" }));
    node.style.setProperty("--mark", one.mark);
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
