// Runs @doublewordai/inference-lab on one thread and prints what it simulated and how long it took.
//
//     node inference_lab.mjs PACKAGE_FOLDER < INPUT
//
// INPUT is JSON: `configuration` (the package's own), `warm_up` (another one, run first), `repeats`
// (runs measured; the best counts) and `horizon_s` (simulated time up to which completions are
// counted as `completed_within_horizon`).
//
// The package hands each token's latency to JavaScript, one call a number; `wall_s` has that,
// `simulating_s` ends where the first object of the result is made. Loading and compiling are in
// neither.

import { readFileSync } from "node:fs";
import { join } from "node:path";
import { performance } from "node:perf_hooks";
import { pathToFileURL } from "node:url";

const folder = process.argv[2];
const { configuration, warm_up, repeats, horizon_s } = JSON.parse(readFileSync(0, "utf8"));
const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
const { initSync, run_simulation } = await import(pathToFileURL(join(folder, "inference_lab.js")));

let first_object_ms = null;
const { Instance } = WebAssembly;
WebAssembly.Instance = function (module, imports) {
  const constructors = Object.keys(imports.wbg).filter((name) => name.startsWith("__wbg_new_"));
  for (const name of constructors) {
    const construct = imports.wbg[name];
    imports.wbg[name] = () => {
      first_object_ms ??= performance.now();
      return construct();
    };
  }
  return new Instance(module, imports);
};
initSync({ module: new WebAssembly.Module(readFileSync(join(folder, "inference_lab_bg.wasm"))) });
WebAssembly.Instance = Instance;

function run(text) {
  first_object_ms = null;
  const began_ms = performance.now();
  const result = run_simulation(text);
  const wall_s = (performance.now() - began_ms) / 1e3;
  if (first_object_ms === null) throw new Error("the package made its result in an unknown way");
  return { result, wall_s, simulating_s: (first_object_ms - began_ms) / 1e3 };
}

// Compiled code replaces the quickly compiled one while the first runs go on.
for (let i = 0; i < 3; i++) run(JSON.stringify(warm_up));

let best = null;
for (let i = 0; i < repeats; i++) {
  const measured = run(JSON.stringify(configuration));
  if (best === null || measured.simulating_s < best.simulating_s) best = measured;
}

const { metrics, latency_samples, distributions } = best.result;
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
const { ttft_samples, e2e_samples, e2e_timestamps } = latency_samples; // ms, ms, s
const tpot_ms = e2e_samples.map(
  (e2e, i) => (e2e - ttft_samples[i]) / (distributions.output_lengths[i] - 1),
);
// Means are taken from the requests: the summary's per_token_mean and ttft_mean are not their means.
console.log(
  JSON.stringify({
    version,
    node: process.version,
    simulated_s: metrics.total_time,
    wall_s: best.wall_s,
    simulating_s: best.simulating_s,
    completed: Number(metrics.completed_requests),
    completed_within_horizon: e2e_timestamps.filter((time) => time <= horizon_s).length,
    mean_ttft_s: mean(ttft_samples) / 1e3,
    mean_tpot_s: mean(tpot_ms) / 1e3,
    mean_latency_s: mean(e2e_samples) / 1e3,
    output_tokens_per_s: metrics.output_tokens_per_sec,
    preemptions: Number(metrics.total_preemptions),
  }),
);
