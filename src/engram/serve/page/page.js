"use strict";
// Everything that names a class, a task or a file comes from elsewhere: it is only ever textContent.

const by = (id) => document.getElementById(id);
const make = (tag, settings = {}, ...inside) => {
  const node = Object.assign(document.createElement(tag), settings);
  node.append(...inside);
  return node;
};
const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

const state = {
  list: null, // the answer of /v1/tasks
  etag: "",
  file: null,
  image: null, // the service's answer about it
  off: new Set(),
  look: null, // the chosen task
  asked: 0, // questions so far: late answers to old ones are dropped
  lost: false,
};

// Talking to the service

async function call(path, options = {}) {
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The service does not answer. Is it still running?");
  }
  if (response.status === 304) return null;
  const body = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(body.error || `The service answered ${response.status}.`);
  return { body, etag: response.headers.get("etag") || "" };
}

function tell(problem) {
  by("problem").textContent = problem;
  by("problem").hidden = !problem;
}

function say(news) {
  by("news").textContent = news;
}

async function refresh() {
  try {
    const got = await call("v1/tasks", { headers: { "If-None-Match": state.etag }, cache: "no-store" });
    if (state.lost) {
      state.lost = false;
      tell("");
    }
    if (!got || got.body.tag === state.list?.tag) return;
    const before = state.list && new Map(state.list.tasks.map((task) => [task.name, task.content]));
    state.list = got.body;
    state.etag = got.etag;
    const now = new Map(state.list.tasks.map((task) => [task.name, task.content]));
    const come = before ? [...now.keys()].filter((name) => before.get(name) !== now.get(name)) : [];
    const gone = before ? [...before.keys()].filter((name) => !now.has(name)) : [];
    if (gone.includes(state.look)) stopLooking();
    about();
    cards(new Set(come));
    if (come.length && state.file) await ask(); // which has news of its own, so it comes first
    if (come.length) say(`Attached just now: ${come.join(", ")}.`);
    else if (gone.length) say(`Gone: ${gone.join(", ")}.`);
  } catch (problem) {
    state.lost = true;
    tell(problem.message);
  }
}

function about() {
  const { trunk, tasks } = state.list;
  const name = trunk.source.split("/").filter(Boolean).pop() || trunk.source;
  by("about").textContent = `One ViT (${name}), ${count(tasks.length, "task", "tasks")}, one pass.`;
}

const names = () => [
  ...(state.list.trunk.classes ? ["base"] : []),
  ...state.list.tasks.map((task) => task.name),
];

async function ask() {
  if (!state.file || !state.list) return;
  const wanted = names().filter((name) => !state.off.has(name));
  const question = ++state.asked;
  if (!wanted.length) return;
  by("answers-part").setAttribute("aria-busy", "true");
  by("cards").classList.add("waiting");
  const form = new FormData();
  form.append("image", state.file, state.file.name || "picture");
  form.append("tasks", wanted.join(","));
  if (state.look && wanted.includes(state.look)) form.append("looks", state.look);
  try {
    const { body } = await call("v1/predict", { method: "POST", body: form });
    if (question !== state.asked) return;
    tell("");
    state.image = body.images[0];
    by("caption").textContent = `${state.image.name}, ${state.image.width} × ${state.image.height}`;
    cards();
    frame();
    if (state.image.looks) showLook();
    const first = wanted.map((name) => `${name}: ${spoken(state.image.tasks[name])}`);
    if (!state.look) say(`Answered. ${first.join("; ")}.`);
  } catch (problem) {
    if (question !== state.asked) return;
    if (form.has("looks")) {
      stopLooking(); // perhaps it looks nowhere: the answers do not depend on it
      if (!state.image) await ask();
    }
    tell(problem.message);
    say("");
    if (/^There is no task/.test(problem.message)) await refresh();
  } finally {
    if (question === state.asked) {
      by("answers-part").setAttribute("aria-busy", "false");
      by("cards").classList.remove("waiting");
    }
  }
}

// Pictures

function take(files) {
  const given = [...files];
  const file = given.find((one) => one.type.startsWith("image/")) || given[0];
  if (!file) return;
  state.file = file;
  state.image = null;
  const look = state.look;
  stopLooking();
  state.look = look;
  tell("");
  const picture = by("picture");
  URL.revokeObjectURL(picture.src);
  picture.hidden = false;
  by("stage").querySelector(".unshown")?.remove();
  picture.alt = `The picture you chose: ${file.name || "pasted"}`;
  picture.src = URL.createObjectURL(file);
  by("caption").textContent = file.name || "pasted";
  by("figure").hidden = false;
  by("invitation").hidden = true;
  cards();
  say("Asking…");
  ask();
}

by("picture").addEventListener("load", () => {
  const picture = by("picture");
  picture.classList.toggle("small", Math.max(picture.naturalWidth, picture.naturalHeight) < 160);
  by("stage").style.setProperty("--aspect", picture.naturalWidth / picture.naturalHeight);
  place();
});
by("picture").addEventListener("error", () => {
  by("picture").hidden = true;
  by("stage").querySelector(".unshown")?.remove();
  by("stage").append(make("p", { className: "unshown quiet", textContent: "This browser cannot show the file." }));
});

for (const [button, input] of [["choose", "file"], ["photograph", "camera"]]) {
  by(button).addEventListener("click", () => by(input).click());
  by(input).addEventListener("change", () => {
    take(by(input).files);
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
  take(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData?.files.length) take(event.clipboardData.files);
});

// Answers, one card a task

// What a line of an answer shows, by the kind of the task.
const lines = {
  classification: (answer) =>
    answer.map((one, place) => ({ label: one.class, text: percent(one.probability), share: one.probability, first: !place })),
  multilabel: (answer) =>
    answer.map((one) => ({
      label: one.class, text: percent(one.probability), share: one.probability, first: one.present, mark: one.threshold,
      about: one.present ? "present" : "absent",
    })),
  regression: (answer) => answer.map((one) => ({ label: one.name, text: one.value.toLocaleString("en"), number: true })),
  segmentation: (answer) =>
    answer.classes.map((one, place) => ({
      label: one.class, text: percent(one.share), share: one.share, first: !place, colour: one.colour,
    })),
};

function spoken(said) {
  if (!said || said.error) return "no answer";
  const told = lines[said.kind](said.answer);
  const best = said.kind === "regression" ? told : said.kind === "multilabel" ? told.filter((one) => one.first) : told.slice(0, 1);
  return best.map((one) => `${one.label} ${one.text}`).join(", ") || "none";
}

function cards(fresh = new Set()) {
  if (!state.list) return;
  const focus = document.activeElement?.dataset?.key;
  const known = new Map(state.list.tasks.map((task) => [task.name, task]));
  by("cards").replaceChildren(...names().map((name) => card(name, known.get(name), fresh.has(name))));
  if (focus) document.querySelector(`[data-key="${CSS.escape(focus)}"]`)?.focus();
}

function card(name, task, fresh) {
  const on = !state.off.has(name);
  const box = make("input", { type: "checkbox", className: "switch", checked: on });
  box.setAttribute("role", "switch");
  box.setAttribute("aria-label", `Ask ${name}`);
  box.dataset.key = `switch ${name}`;
  box.addEventListener("change", () => turn(name, box.checked));
  const facts = task
    ? [
        task.kind === "regression" ? count(task.classes, "number", "numbers") : count(task.classes, "class", "classes"),
        ...(task.cells ? [`${count(task.cells, "cell", "cells")} a layer`] : [task.regime]),
        ...(task.extends.length ? [`extends ${task.extends.join(", ")}`] : []),
        ...(task.kind === "classification" ? [] : [task.kind]),
      ]
    : [count(state.list.trunk.classes, "class", "classes")];
  const node = make(
    "article",
    { className: "card" },
    make("div", { className: "row" },
      make("div", {}, make("h3", { textContent: name }),
        make("p", { className: "quiet", textContent: facts.join(" · ") })),
      box),
  );
  node.dataset.task = name;
  node.classList.toggle("base", !task);
  node.classList.toggle("off", !on);
  node.classList.toggle("fresh", fresh);
  node.classList.toggle("chosen", state.look === name && !by("look").hidden);
  const answer = on && state.image?.tasks[name];
  if (answer?.error) node.append(make("p", { className: "quiet", textContent: answer.error }));
  else if (answer) node.append(shown(name, answer));
  return node;
}

function shown(name, said) {
  const list = make("div", { className: "answers" });
  const open = state.look === name && !by("look").hidden;
  lines[said.kind](said.answer).forEach((one, place) => {
    const label = make("span", { textContent: one.label });
    const row = make("button", { type: "button", className: "answer" }, label, make("b", { textContent: one.text }));
    row.classList.toggle("first", Boolean(one.first));
    row.classList.toggle("number", Boolean(one.number));
    row.style.setProperty("--share", one.share || 0);
    if (one.colour) {
      const swatch = make("i", { className: "swatch" });
      swatch.style.background = one.colour;
      label.prepend(swatch);
    }
    if (one.mark !== undefined) {
      row.append(make("i", { className: "mark" }));
      row.style.setProperty("--mark", one.mark);
    }
    row.dataset.key = `answer ${name} ${place}`;
    row.setAttribute("aria-pressed", String(open && place === 0));
    row.title = [one.about, `show where ${name} looked`].filter(Boolean).join("; ");
    row.addEventListener("click", () => (state.look === name && !by("look").hidden ? stopLooking(true) : look(name)));
    list.append(row);
  });
  return list;
}

function turn(name, on) {
  if (on) state.off.delete(name);
  else state.off.add(name);
  if (!on && state.look === name) stopLooking();
  cards();
  if (on) ask();
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !by("look").hidden) return stopLooking(true);
  if (!["ArrowDown", "ArrowUp"].includes(event.key) || !event.target.classList?.contains("answer")) return;
  const rows = [...document.querySelectorAll("button.answer")];
  const next = rows[rows.indexOf(event.target) + (event.key === "ArrowDown" ? 1 : -1)];
  if (next) {
    event.preventDefault();
    next.focus();
  }
});

// Where a class token looked

async function look(name) {
  state.look = name;
  say(`Looking where ${name} looked…`);
  await ask();
}

function stopLooking(redraw = false) {
  state.look = null;
  if (state.image) delete state.image.looks;
  for (const id of ["look", "heat", "mask", "seen"]) by(id).hidden = true;
  if (redraw) cards();
}

function showLook() {
  const { task, parts, layers } = state.image.looks;
  const has = by("look").hidden || by("look").dataset.task !== task;
  by("look").hidden = false;
  by("look").dataset.task = task;
  by("look-title").textContent = `Where ${task} looked`;
  const cells = layers.reduce((sum, layer) => sum + layer.shares[3], 0) / layers.length;
  const drawn = Boolean(state.image.tasks[task]?.answer?.mask);
  if (drawn) by("look-title").textContent = `What ${task} drew, and where it looked`;
  by("look-words").textContent = drawn
    ? `A class for every pixel; a layer shows where its class tokens looked. On average they read ${percent(cells)} from their cells.`
    : task === "base"
      ? "The attention of the ViT's own class token: bright is where it looked."
      : `The attention of its class token: bright is where it looked. On average it read ${percent(cells)} from its cells.`;
  const slider = by("layer");
  slider.max = layers.length;
  if (has) slider.value = 0;
  by("reads").replaceChildren(
    ...layers.map((layer, index) => {
      const bars = layer.shares.map((share, part) => {
        const bar = make("u", { className: `p${part}` });
        bar.style.setProperty("--share", share);
        return bar;
      });
      const row = make("button", { type: "button" },
        make("span", { textContent: `Layer ${index + 1}` }),
        make("i", {}, ...bars),
        make("b", { textContent: percent(layer.shares[3]) }));
      row.setAttribute("aria-label", `Layer ${index + 1}: ${parts.map((part, i) => `${part} ${percent(layer.shares[i])}`).join(", ")}`);
      row.addEventListener("click", () => {
        slider.value = Number(slider.value) === index + 1 ? 0 : index + 1;
        heat();
      });
      return row;
    }),
  );
  by("key").replaceChildren(
    ...parts.map((part, index) =>
      make("li", { hidden: !layers.some((layer) => layer.shares[index] > 0) },
        make("i", { className: `p${index}` }), part)),
  );
  cards();
  heat();
  if (has) by("stage").scrollIntoView({ block: "nearest" }); // on a phone it is far above
  say(`Showing where ${task} looked. Escape closes.`);
}

by("layer").addEventListener("input", () => heat());
by("close").addEventListener("click", () => stopLooking(true));

function heat() {
  if (!state.image?.looks) return;
  const { layers } = state.image.looks;
  const chosen = Number(by("layer").value);
  const said = state.image.tasks[state.image.looks.task];
  const masked = Boolean(said?.answer?.mask) && !chosen; // a mask first, its layers when asked for
  by("layer-name").textContent = chosen ? `Layer ${chosen}` : masked ? "Mask" : "All layers";
  by("mask").hidden = !masked;
  if (masked) by("mask").src = said.answer.mask;
  by("layer").setAttribute("aria-valuetext", by("layer-name").textContent);
  [...by("reads").children].forEach((row, index) => row.setAttribute("aria-pressed", String(index + 1 === chosen)));
  const some = chosen ? [layers[chosen - 1]] : layers;
  const rows = some[0].patches.length;
  const columns = some[0].patches[0].length;
  const values = new Float64Array(rows * columns);
  for (const layer of some) layer.patches.forEach((row, r) => row.forEach((value, c) => (values[r * columns + c] += value)));
  const most = Math.max(...values) || 1;
  const small = make("canvas", { width: columns, height: rows });
  const pixels = small.getContext("2d").createImageData(columns, rows);
  values.forEach((value, i) => {
    const light = Math.sqrt(value / most);
    pixels.data.set([24 + 60 * light, 12 + 20 * light, 48 + 70 * light, 215 * (1 - light) + 6], 4 * i);
  });
  small.getContext("2d").putImageData(pixels, 0, 0);
  const canvas = by("heat");
  canvas.width = 24 * columns;
  canvas.height = 24 * rows;
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  canvas.hidden = masked;
  canvas.dataset.layer = chosen;
  place();
}

// Overlays lie on the part of the picture that the ViT saw.

function frame() {
  const { view, width, height } = state.image;
  by("seen").hidden = !state.look || (view[0] < 1 && view[1] < 1 && view[2] > width - 1 && view[3] > height - 1);
  place();
}

function place() {
  if (!state.image) return;
  const { view, width, height } = state.image;
  const [left, top, right, bottom] = view;
  for (const id of ["heat", "mask", "seen"])
    Object.assign(by(id).style, {
      left: `${(100 * left) / width}%`,
      top: `${(100 * top) / height}%`,
      width: `${(100 * (right - left)) / width}%`,
      height: `${(100 * (bottom - top)) / height}%`,
    });
}

// The service may gain and lose tasks while the page is open.

refresh();
setInterval(() => document.hidden || refresh(), 2000);
document.addEventListener("visibilitychange", () => document.hidden || refresh());
