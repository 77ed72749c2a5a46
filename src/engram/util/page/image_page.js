// A page that answers about an image: of the service, and of a model exported for a browser.
// Names of classes, tasks and files come from elsewhere, so they are only ever set as textContent.

export const by = (id) => document.getElementById(id);
export const make = (tag, settings = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), settings);
  node.append(...children);
  return node;
};
export const percent = (share) => `${(100 * share).toFixed(share < 0.0995 ? 1 : 0)} %`;
export const count = (n, one, many) => `${n.toLocaleString("en")} ${n === 1 ? one : many}`;

export function showProblem(sentence, id = "problem") {
  by(id).textContent = sentence;
  by(id).hidden = !sentence;
}
export const announce = (sentence) => (by("news").textContent = sentence);
export const setBusy = (busy) => by("cards").setAttribute("aria-busy", String(busy));

export function describeModel(source, tasks, more = "") {
  const name = source.split("/").filter(Boolean).pop() || source;
  by("about").textContent = `One ViT (${name}), ${count(tasks, "task", "tasks")}, one pass. ${more}`;
}

// Choosing an image

export function takeFiles(button, input, take) {
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => {
    take([...input.files]);
    input.value = "";
  });
}

// Files that are dropped on a part of the page; `box` shows where they would go.
export function takeDrops(target, box, take) {
  for (const kind of ["dragenter", "dragover"])
    target.addEventListener(kind, (event) => {
      event.preventDefault();
      event.stopPropagation();
      document.querySelector(".over")?.classList.remove("over");
      box.classList.add("over");
    });
  target.addEventListener("dragleave", (event) => {
    if (!target.contains(event.relatedTarget)) box.classList.remove("over");
  });
  target.addEventListener("drop", (event) => {
    event.preventDefault();
    event.stopPropagation();
    box.classList.remove("over");
    take([...event.dataTransfer.files]);
  });
}

// Call `choose` with the file that a person chooses, photographs, drops or pastes.
export function takeImages(choose) {
  const take = (files) => {
    const file = files.find((one) => one.type.startsWith("image/")) || files[0];
    if (file) choose(file);
  };
  takeFiles(by("choose"), by("file"), take);
  takeFiles(by("photograph"), by("camera"), take);
  takeDrops(document, by("drop"), take);
  document.addEventListener("paste", (event) => take([...(event.clipboardData?.files ?? [])]));
  by("image").addEventListener("load", () => {
    const { naturalWidth, naturalHeight } = by("image");
    by("image").classList.toggle("small", Math.max(naturalWidth, naturalHeight) < 160);
    by("stage").style.setProperty("--aspect", naturalWidth / naturalHeight);
  });
  by("image").addEventListener("error", () => {
    by("image").hidden = true;
    by("stage").append(make("p", { className: "unshown quiet", textContent: "This browser cannot show the file." }));
  });
}

export function showImage(file) {
  const image = by("image");
  URL.revokeObjectURL(image.src);
  by("stage").querySelector(".unshown")?.remove();
  image.hidden = false;
  image.alt = `The chosen image: ${file.name || "pasted"}`;
  image.src = URL.createObjectURL(file);
  by("caption").textContent = file.name || "pasted";
  by("figure").hidden = false;
  by("empty").hidden = true;
}

// Lay a node over the part of an image that the model sees.
export function placeOver(node, [left, top, right, bottom], width, height) {
  Object.assign(node.style, {
    left: `${(100 * left) / width}%`,
    top: `${(100 * top) / height}%`,
    width: `${(100 * (right - left)) / width}%`,
    height: `${(100 * (bottom - top)) / height}%`,
  });
}

// Answers

const classRow = (one, first, more) => ({ label: one.class, text: percent(one.probability), share: one.probability, first, ...more });

// The rows of an answer, by the kind of the task.
export const rowsOf = {
  classification: (answer) => answer.map((one, place) => classRow(one, !place)),
  multilabel: (answer) =>
    answer.map((one) => classRow(one, one.present, { mark: one.threshold, about: one.present ? "present" : "absent" })),
  regression: (answer) => answer.map((one) => ({ label: one.name, text: one.value.toLocaleString("en"), number: true })),
  segmentation: (answer) =>
    answer.classes.map((one, place) => ({
      label: one.class, text: percent(one.share), share: one.share, first: !place, colour: one.colour,
    })),
  anomaly: ({ score, threshold, anomalous }) => [
    { label: anomalous ? "anomalous" : "good", text: score.toFixed(3), first: true, share: Math.min(1, score / threshold / 2) },
    { label: "threshold", text: threshold.toFixed(3), share: 0.5 },
  ],
};

export function answerRow(one, tag = "div") {
  const label = make("span", { textContent: one.label });
  const row = make(tag, { className: "answer", title: one.about || "" }, label, make("b", { textContent: one.text }));
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
  return row;
}

export const isUnfamiliar = ({ familiarity }) => typeof familiarity === "number" && familiarity < 0;

// The start of a card: the name of a task, and facts about it.
export const cardTitle = (name, facts) =>
  make("div", {}, make("h3", { textContent: name }), make("p", { className: "quiet", textContent: facts.join(" · ") }));

// What the card of a task says below its name: an error, or its rows and how familiar the image is.
export function resultNodes(name, result, row = (one) => answerRow(one)) {
  if (result.error) return [make("p", { className: "quiet", textContent: result.error })];
  const rows = make("div", { className: "answers" }, ...rowsOf[result.kind](result.answer).map(row));
  if (typeof result.familiarity !== "number") return [rows]; // the task keeps no statistics
  const number = result.familiarity.toFixed(2).replace("-", "−");
  const note = isUnfamiliar(result)
    ? { className: "unfamiliar", textContent: `Looks unlike what ${name} learned from: familiarity ${number}, where 1 is usual.` }
    : { className: "quiet", textContent: `Familiarity ${number}, where 1 is usual.` };
  return [rows, make("p", note)];
}
