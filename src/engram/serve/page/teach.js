// Teach a task from a few images: /v1/embed turns them into vectors, /v1/teach makes an engram of these.
// The page holds images and vectors; the service keeps neither. The answers are computed here, from the engram.

import { answerRow, by, count, make, percent, showProblem, takeDrops, takeFiles } from "./image_page.js";
import { call, choose, refresh, state } from "./page.js";

const lesson = {
  classes: [], // { input, box, thumbs, images: [{ file, url }] }
  head: null, // of the last engram
  requests: 0, // so far: late responses to old requests are dropped
  dragged: null, // the file of a picture of this page that is being dragged
  attached: "", // the name under which this task is attached
};
const vectors = new WeakMap(); // by file: a promise

function vectorOf(file) {
  if (!vectors.has(file)) {
    const form = new FormData();
    form.append("image", file, file.name || "image");
    form.append("tasks", "base");
    const found = call("v1/embed", { method: "POST", body: form }).then(({ body }) => body.images[0].vectors.base);
    found.catch(() => vectors.delete(file)); // it may be tried again
    vectors.set(file, found);
  }
  return vectors.get(file);
}

const showLessonProblem = (sentence) => showProblem(sentence, "teach-problem");

// Classes and their images

function addClass() {
  const number = lesson.classes.length + 1;
  const one = { images: [] };
  one.input = make("input", { value: `class ${number}`, maxLength: 200, autocomplete: "off" });
  one.input.setAttribute("aria-label", `Name of class ${number}`);
  one.input.addEventListener("change", learn);
  one.thumbs = make("ul", { className: "thumbs" });
  const ways = make("div", { className: "ways" });
  for (const [words, source] of [["Add images", "file"], ["Take a photo", "camera"]]) {
    const input = by(source).cloneNode(); // of the page: the same formats, the same camera
    input.removeAttribute("id");
    input.multiple = source === "file";
    input.setAttribute("aria-label", `${words} of class ${number}`);
    const button = make("button", { type: "button", className: "second", textContent: words });
    takeFiles(button, input, (files) => addImages(one, files));
    ways.append(button, input);
  }
  one.box = make("div", { className: "lesson" }, one.input, one.thumbs, ways);
  takeDrops(one.box, one.box, (files) => {
    addImages(one, lesson.dragged ? [lesson.dragged] : files);
    lesson.dragged = null;
  });
  lesson.classes.push(one);
  by("lessons").append(one.box);
  return one;
}

// An image is in one class: adding it to another moves it.
async function addImages(one, files) {
  showLessonProblem("");
  for (const file of files) {
    removeImage(file);
    one.images.push({ file, url: URL.createObjectURL(file) });
  }
  drawThumbs();
  for (const file of files)
    try {
      await vectorOf(file);
    } catch (problem) {
      removeImage(file);
      showLessonProblem(problem.message);
    }
  drawThumbs();
  await learn();
}

function removeImage(file) {
  for (const one of lesson.classes)
    one.images = one.images.filter((image) => {
      if (image.file === file) URL.revokeObjectURL(image.url);
      return image.file !== file;
    });
}

function drawThumbs() {
  for (const one of lesson.classes) one.thumbs.replaceChildren(...one.images.map((image) => thumb(one, image)));
}

function thumb(one, { file, url }) {
  const name = file.name || "pasted";
  const picture = make("img", { src: url, alt: `${name}, ${one.input.value}` });
  const open = make("button", { type: "button", className: "open", title: "Show it, to move it to another class" }, picture);
  open.setAttribute("aria-current", String(state.file === file));
  open.addEventListener("click", () => choose(file));
  const remove = make("button", { type: "button", className: "remove", textContent: "×" });
  remove.setAttribute("aria-label", `Remove ${name} from ${one.input.value}`);
  remove.addEventListener("click", () => {
    removeImage(file);
    drawThumbs();
    learn();
  });
  const item = make("li", { draggable: true }, open, remove);
  item.addEventListener("dragstart", () => (lesson.dragged = file));
  return item;
}

by("image").addEventListener("dragstart", () => (lesson.dragged = state.file));
document.addEventListener("dragend", () => (lesson.dragged = null));

// Learning and answering

const className = (one) => one.input.value.trim();
const examples = () =>
  lesson.classes.flatMap((one) => (className(one) ? one.images.map(({ file }) => ({ file, label: className(one) })) : []));

async function teach(statistics) {
  const known = examples();
  const sent = {
    task: by("teach-name").value.trim(),
    labels: known.map(({ label }) => label),
    vectors: await Promise.all(known.map(({ file }) => vectorOf(file))),
    statistics,
  };
  const headers = { "Content-Type": "application/json" };
  const { body } = await call("v1/teach", { method: "POST", headers, body: JSON.stringify(sent), binary: true });
  return body;
}

// The head and the metrics in an engram: a safetensors file.
function readHead(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  const tensor = (name) => {
    const [start, end] = header[name].data_offsets;
    return new Float32Array(buffer.slice(8 + size + start, 8 + size + end));
  };
  const { task, metrics } = JSON.parse(header.__metadata__.engram);
  return { classes: task.classes, weight: tensor("head.weight"), bias: tensor("head.bias"), metrics };
}

async function learn() {
  const number = ++lesson.requests;
  const known = examples();
  let head = null;
  if (new Set(known.map(({ label }) => label)).size > 1) {
    by("lesson-status").textContent = "Learning…";
    try {
      head = readHead(await teach("off"));
      if (number === lesson.requests) showLessonProblem("");
    } catch (problem) {
      if (number === lesson.requests) showLessonProblem(problem.message);
    }
  }
  if (number !== lesson.requests) return;
  lesson.head = head;
  by("lesson-status").textContent = statusOf(known);
  by("lesson-save").hidden = !head;
  by("attach").hidden = !state.list?.attaching;
  await answer();
}

function statusOf(known) {
  if (!lesson.head) return known.length ? "It can answer as soon as two classes have images." : "";
  const learned = `It learned ${count(known.length, "image", "images")} of ${count(lesson.head.classes.length, "class", "classes")}.`;
  const val = lesson.head.metrics.val;
  return val
    ? `${learned} With each image left out once, ${Math.round(val.held_out * val.images)} of ${val.images} were right.`
    : `${learned} How good it is cannot be said before a class has a second image.`;
}

async function answer() {
  const { head } = lesson;
  const { file } = state;
  let vector = null;
  if (head && file)
    try {
      vector = await vectorOf(file);
    } catch {
      vector = null; // the page says already that the image cannot be read
    }
  if (head !== lesson.head || file !== state.file) return;
  by("lesson-answer").hidden = !vector;
  if (!vector) return;
  const shares = softmax(head, vector);
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a]);
  by("lesson-rows").replaceChildren(...order.map((index, place) => classRow(head.classes[index], shares[index], !place, file)));
}

function softmax({ classes, weight, bias }, vector) {
  const logits = classes.map((_, c) => vector.reduce((sum, x, i) => sum + x * weight[c * vector.length + i], bias[c]));
  const largest = Math.max(...logits);
  const parts = logits.map((logit) => Math.exp(logit - largest));
  const whole = parts.reduce((a, b) => a + b);
  return parts.map((part) => part / whole);
}

function classRow(name, share, first, file) {
  const row = answerRow({ label: name, text: percent(share), share, first, about: `Teach it that this is ${name}` }, "button");
  row.addEventListener("click", () => addImages(lesson.classes.find((one) => className(one) === name), [file]));
  return row;
}

document.addEventListener("image-chosen", () => {
  drawThumbs();
  answer();
});
by("add-class").addEventListener("click", () => addClass().input.select());
by("teach").addEventListener("toggle", () => {
  if (!lesson.classes.length) [addClass(), addClass()];
});

// Saving

async function save(work) {
  showLessonProblem("");
  try {
    await work(by("teach-name").value.trim(), await teach(by("keep-sums").checked ? "on" : "off"));
  } catch (problem) {
    showLessonProblem(problem.message);
  }
}

by("download").addEventListener("click", () =>
  save(async (name, engram) => {
    const url = URL.createObjectURL(new Blob([engram], { type: "application/octet-stream" }));
    make("a", { href: url, download: `${name}.safetensors` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
    by("lesson-status").textContent = `${name}.safetensors was downloaded.`;
  }));

by("attach").addEventListener("click", () =>
  save(async (name, engram) => {
    const path = `v1/tasks/${encodeURIComponent(name)}`;
    const headers = lesson.attached === name ? {} : { "If-None-Match": "*" }; // replace only what was taught here
    await call(path, { method: "PUT", body: engram, headers });
    lesson.attached = name;
    by("lesson-status").textContent = `${name} is attached, and answers with the other tasks.`;
    await refresh();
  }));
