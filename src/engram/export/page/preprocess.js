// An image as the model sees it: resized and cropped in Pillow's fixed-point arithmetic, so that
// every pixel is the one that Engram computes. The counterpart of predict.py.

const roundEven = (x) => {
  const up = Math.floor(x + 0.5);
  return up - x === 0.5 && up % 2 ? up - 1 : up;
};

// The part of an image that the model sees: [left, top, right, bottom].
export function evaluationBox(width, height, { size, resize }) {
  if (resize === null) return [0, 0, width, height];
  const scale = resize / Math.min(width, height);
  const wide = roundEven(width * scale);
  const high = roundEven(height * scale);
  const left = Math.floor((wide - size[1]) / 2);
  const top = Math.floor((high - size[0]) / 2);
  const x = width / wide;
  const y = height / high;
  return [left * x, top * y, (left + size[1]) * x, (top + size[0]) * y];
}

const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

const KERNELS = { // of |x|, with their radius
  box: [0.5, (x) => (x <= 0.5 ? 1 : 0)],
  bilinear: [1, (x) => Math.max(1 - x, 0)],
  hamming: [1, (x) => (x < 1 ? sinc(x) * (0.54 + 0.46 * Math.cos(Math.PI * x)) : 0)],
  bicubic: [2, (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? -0.5 * (((x - 5) * x + 8) * x - 4) : 0)],
  lanczos: [3, (x) => (x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};
const ONE = 2 ** 22; // weights are integers of this unit

// For each of `size` places between `low` and `high`: the first pixel that counts, and the weights.
function coefficients(low, high, length, size, method) {
  low = Math.fround(low);
  high = Math.fround(high);
  const scale = Math.fround(high - low) / size;
  const places = [];
  if (method === "nearest") {
    for (let i = 0, at = low + 0.5 * scale; i < size; i++, at += scale)
      places.push({ first: Math.min(Math.floor(at), length - 1), weights: [ONE] });
    return places;
  }
  const [radius, kernel] = KERNELS[method];
  const wide = Math.max(scale, 1);
  for (let i = 0; i < size; i++) {
    const centre = low + (i + 0.5) * scale;
    const first = Math.max(Math.trunc(centre - radius * wide + 0.5), 0);
    const last = Math.min(Math.trunc(centre + radius * wide + 0.5), length);
    const weights = [];
    for (let j = first; j < last; j++) weights.push(kernel(Math.abs((j - centre + 0.5) / wide)));
    const sum = weights.reduce((a, b) => a + b, 0);
    places.push({ first, weights: weights.map((w) => Math.trunc((w / sum) * ONE + (w < 0 ? -0.5 : 0.5))) });
  }
  return places;
}

// Resample one axis of {data, width, height, channels}; the result has three channels.
function resample(image, places, across) {
  const { data, width, height, channels } = image;
  const out = across ? { width: places.length, height } : { width, height: places.length };
  const pixels = new Uint8ClampedArray(out.width * out.height * 3);
  const step = (across ? 1 : width) * channels; // from a pixel to the next that is averaged with it
  for (let y = 0, to = 0; y < out.height; y++)
    for (let x = 0; x < out.width; x++) {
      const { first, weights } = places[across ? x : y];
      let at = (across ? y * width + first : first * width + x) * channels;
      let red = ONE / 2, green = ONE / 2, blue = ONE / 2;
      for (let k = 0; k < weights.length; k++, at += step) {
        red += weights[k] * data[at];
        green += weights[k] * data[at + 1];
        blue += weights[k] * data[at + 2];
      }
      pixels[to++] = Math.floor(red / ONE);
      pixels[to++] = Math.floor(green / ONE);
      pixels[to++] = Math.floor(blue / ONE);
    }
  return { data: pixels, ...out, channels: 3 };
}

// RGBA pixels to RGB pixels of the model's size.
export function view(data, width, height, settings) {
  const [left, top, right, bottom] = evaluationBox(width, height, settings);
  const [high, wide] = settings.size;
  const columns = coefficients(left, Math.min(right, width), width, wide, settings.interpolation);
  const rows = coefficients(top, Math.min(bottom, height), height, high, settings.interpolation);
  const image = { data, width, height, channels: 4 };
  if (height > 100 * width && high < height) return resample(resample(image, rows, false), columns, true).data;
  return resample(resample(image, columns, true), rows, false).data;
}

// RGB pixels to the numbers of the model's input: (3, height, width).
export function normalise(pixels, { mean, std }) {
  const count = pixels.length / 3;
  const out = new Float32Array(pixels.length);
  for (let c = 0; c < 3; c++) {
    const scale = Math.fround(1 / Math.fround(255 * Math.fround(std[c])));
    const shift = Math.fround(Math.fround(Math.fround(mean[c]) * 255) * scale);
    for (let i = 0; i < count; i++) out[c * count + i] = Math.fround(pixels[3 * i + c] * scale) - shift;
  }
  return out;
}
