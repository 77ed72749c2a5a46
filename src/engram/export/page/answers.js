// The answer of a task from its output, as `engram predict` gives it.

export function answer(output, shape, task, topK = 5) {
  const classes = task.classes;
  if (task.kind === "regression") return classes.map((name, i) => ({ name, value: Number(output[i].toPrecision(6)) }));
  if (task.kind === "segmentation") return segmentation(output, shape, classes, topK);
  if (task.kind === "anomaly") return anomaly(output, shape, task.thresholds[0]);
  const scores = task.kind === "multilabel" ? Array.from(output, (x) => 1 / (1 + Math.exp(-x))) : softmax(output);
  const order = [...scores.keys()].sort((a, b) => scores[b] - scores[a] || a - b);
  const rows = order.map((i) => ({ class: classes[i], probability: scores[i] }));
  if (task.kind !== "multilabel") return rows.slice(0, topK);
  order.forEach((i, place) => Object.assign(rows[place], { threshold: task.thresholds[i], present: scores[i] >= task.thresholds[i] }));
  return rows.filter((row, place) => place < topK || row.present);
}

function softmax(logits) {
  const most = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const odds = Array.from(logits, (x) => Math.exp(x - most));
  const sum = odds.reduce((a, b) => a + b, 0);
  return odds.map((x) => x / sum);
}

// The class of every pixel, and the share of each class.
function segmentation(logits, [, , height, width], classes, topK) {
  const count = height * width;
  const mask = new Uint8Array(count);
  const shares = new Float64Array(classes.length);
  for (let i = 0; i < count; i++) {
    let best = 0;
    for (let c = 1; c < classes.length; c++) if (logits[c * count + i] > logits[best * count + i]) best = c;
    mask[i] = best;
    shares[best] += 1 / count;
  }
  const order = [...shares.keys()].sort((a, b) => shares[b] - shares[a] || a - b).slice(0, topK);
  const palette = classes.map((_, i) => colour(i));
  return { classes: order.map((i) => ({ class: classes[i], share: shares[i], colour: `rgb(${palette[i].join(" ")})` })), size: [height, width], overlay: painted(mask, (i) => palette[i]) };
}

// RGBA pixels, each in the colour of its value.
function painted(values, colourOf) {
  const pixels = new Uint8ClampedArray(4 * values.length).fill(255);
  values.forEach((value, i) => pixels.set(colourOf(value), 4 * i));
  return pixels;
}

// The mean distance of the worst patches, one in a hundred, and a picture of all.
function anomaly(distances, [, rows, columns], threshold) {
  const worst = Array.from(distances).sort((a, b) => b - a).slice(0, Math.max(1, Math.round(0.01 * distances.length)));
  const score = worst.reduce((a, b) => a + b, 0) / worst.length;
  const overlay = painted(distances, (x) => heat(Math.min(2, x / Math.max(threshold, 1e-6))));
  return { score, threshold, anomalous: score > threshold, size: [rows, columns], overlay };
}

// From nothing over the threshold (1) to twice the threshold.
const STOPS = [[12, 8, 38], [72, 20, 92], [170, 46, 86], [243, 120, 32], [252, 238, 150]];
function heat(relative) {
  const at = Math.min(Math.floor(2 * relative), STOPS.length - 2);
  return STOPS[at].map((low, c) => Math.round(low + (2 * relative - at) * (STOPS[at + 1][c] - low)));
}

// The colour of a class in a mask: hues at the golden angle, far apart.
function colour(index) {
  const hue = ((0.62 + 0.381966 * index) % 1) * 6;
  const part = (n) => {
    const k = (n + hue) % 6;
    return Math.trunc(255 * 0.95 * (1 - 0.75 * Math.max(0, Math.min(k, 4 - k, 1))));
  };
  return [part(5), part(3), part(1)];
}
