// The model, beside the page: images come in as pixels, answers go out. Nothing is sent anywhere.
import { answer } from "./answers.js";
import { normalise, view } from "./preprocess.js";

let ort;
let session;
let site;

async function load(given) {
  site = given;
  const runtime = new URL(site.runtime.address, self.location.href).href;
  const weights = await download();
  const attempts = site.runtime.webgpu && (await self.navigator.gpu?.requestAdapter().catch(() => null)) ? ["webgpu", "wasm"] : ["wasm"];
  let problem;
  for (const provider of attempts)
    try {
      ort = await import(`${runtime}ort.${provider}.min.mjs`);
      ort.env.wasm.wasmPaths = runtime;
      // Threads share memory, which a page may only do when it is isolated from others.
      ort.env.wasm.numThreads = self.crossOriginIsolated && site.runtime.copied ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
      session = await ort.InferenceSession.create(weights, { executionProviders: [provider], graphOptimizationLevel: "all" });
      return { provider, threads: ort.env.wasm.numThreads };
    } catch (error) {
      problem = error;
    }
  throw problem;
}

async function download() {
  const response = await fetch(site.model);
  if (!response.ok) throw new Error(`The model cannot be loaded (${response.status}).`);
  const weights = new Uint8Array(site.bytes);
  const reader = response.body.getReader();
  let done = 0;
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    weights.set(part.value, done);
    done += part.value.length;
    self.postMessage({ loaded: done });
  }
  if (done !== site.bytes) throw new Error("The model is not complete. Load the page again.");
  return weights;
}

async function predict({ data, width, height }) {
  const { preprocessing, tasks } = site.about;
  const pixels = normalise(view(data, width, height, preprocessing), preprocessing);
  const input = new ort.Tensor("float32", pixels, [1, 3, ...preprocessing.size]);
  const outputs = await session.run({ pixels: input });
  const found = {};
  for (const [name, task] of Object.entries(tasks)) {
    if (task.kind === "embedding") continue;
    const output = outputs[name];
    const familiarity = task.familiarity ? outputs[task.familiarity].data[0] : null;
    const finite = output.data.every(Number.isFinite);
    found[name] = finite
      ? { kind: task.kind, answer: answer(output.data, output.dims, task), familiarity: Number.isFinite(familiarity) ? familiarity : null }
      : { error: `The output of ${name} is not finite.` };
  }
  return { tasks: found };
}

const calls = { load, predict };
self.addEventListener("message", async ({ data }) => {
  try {
    self.postMessage({ id: data.id, result: await calls[data.call](data.given) });
  } catch (error) {
    self.postMessage({ id: data.id, problem: error?.message || String(error) });
  }
});
