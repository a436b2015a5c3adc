"""The live backend's load and measurements beside `vllm bench serve`, on the same server and load.

    python benchmarks/vllm_bench_serve.py --vllm .venv-vllm/bin/vllm --model .venv-vllm/model \
        [--rounds 3] [--requests 200] [--rate 3] [--out benchmarks/results/vllm_bench_serve.json]

Every round runs `vllm bench serve` (random prompts, Poisson arrivals, another seed), takes from its
detailed result when each request was sent and how long it was, and plays the very same sequence
through gate, client and records of the live backend, twice, with a cap that never binds: the two
show how far the server differs from itself. Both sides' percentiles are taken from their raw times
by the same code. Latency and TTFT run from the moment of sending there, and from the scheduled
arrival here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.backends import Outcome
from vllm_tenant_tuning.backends.live.backend import LiveBackend
from vllm_tenant_tuning.backends.live.options import live_options
from vllm_tenant_tuning.backends.live.server import VLLMServer
from vllm_tenant_tuning.scenario import Scenario
from vllm_tenant_tuning.workload import RequestStream

SERVE = ("--dtype", "bfloat16", "--enforce-eager", "--served-model-name", "tiny")
CAP = 4096
LOAD = ("requests", "rate", "prompt_tokens", "output_tokens")

Floats = npt.NDArray[np.float64]


def scenario_of(duration_s: float) -> Scenario:
    """One tenant whose cap never binds, on the CPU server's engine."""
    content = load_scenario("cpu_chat_batch").model_dump(mode="json")
    tenant = content["tenants"][0]
    tenant |= {"patience_s": None, "cap_initial": CAP}
    control = content["control"] | {"control_interval_s": 1.0, "cap_max": CAP}
    control |= {"episode_s": float(np.ceil(duration_s))}
    return Scenario.model_validate(content | {"tenants": [tenant], "control": control})


def measures(sent_s: Floats, first_s: Floats, end_s: Floats, tokens: Floats) -> dict[str, float]:
    """Throughput and percentiles from the times of all requests, in seconds."""
    span_s = end_s.max() - sent_s.min()
    result = {
        "requests_per_s": len(sent_s) / span_s,
        "output_tokens_per_s": tokens.sum() / span_s,
        "tpot_p50_s": float(np.median((end_s - first_s) / (tokens - 1))),
    }
    for name, values in (("ttft", first_s - sent_s), ("latency", end_s - sent_s)):
        for level in (50, 95, 99):
            result[f"{name}_p{level}_s"] = float(np.percentile(values, level))
    return {name: round(value, 6) for name, value in result.items()}


def bench_serve(arguments: argparse.Namespace, url: str, seed: int, out: Path) -> dict[str, Any]:
    """Run `vllm bench serve`; its detailed result."""
    lengths = ("--random-input-len", str(arguments.prompt_tokens))
    lengths += ("--random-output-len", str(arguments.output_tokens))
    command = [arguments.vllm, "bench", "serve", "--backend", "openai", "--base-url", url]
    command += ["--endpoint", "/v1/completions", "--model", arguments.model]
    command += ["--served-model-name", "tiny", "--dataset-name", "random", *lengths]
    command += ["--num-prompts", str(arguments.requests), "--request-rate", str(arguments.rate)]
    command += ["--seed", str(seed), "--ignore-eos", "--disable-tqdm", "--num-warmups", "4"]
    command += ["--save-result", "--save-detailed", "--result-dir", str(out)]
    command += ["--result-filename", f"{seed}.json"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    content: dict[str, Any] = json.loads((out / f"{seed}.json").read_text())
    assert content["completed"] == arguments.requests, f"{content['failed']} requests failed"
    return content


def replay(url: str, sent_s: Floats, result: dict[str, Any], out: Path) -> dict[str, Any]:
    """Play the same requests through the live backend."""
    n = len(sent_s)
    order = np.argsort(sent_s, kind="stable")
    stream = RequestStream(
        offsets=np.array([0, n]),
        arrival_s=sent_s[order] - sent_s.min(),
        prompt_tokens=np.array(result["input_lens"])[order],
        output_tokens=np.array(result["output_lens"])[order],
        service_s=np.full(n, np.nan),
    )
    duration_s = stream.arrival_s[-1] + 120.0
    backend = LiveBackend(scenario_of(duration_s), url=url, out_dir=out)
    try:
        caps = np.array([[CAP]])
        backend.reset(0, stream, caps[0])
        for _ in range(int(duration_s)):
            backend.advance(caps, np.ones(1, np.bool_))
            if backend.faults():
                raise RuntimeError(f"the episode ended with {backend.faults()}")
            outcomes = backend.outcomes(0)
            if (outcomes.outcome == Outcome.COMPLETED).sum() == n:
                break
        else:
            raise RuntimeError("not every request was completed")
        live = backend.extra_info(0)["live"]
    finally:
        backend.close()
    ours = measures(
        outcomes.arrival_s,
        outcomes.first_token_s,
        outcomes.finished_s,
        outcomes.output_tokens.astype(np.float64),
    )
    lateness = {key: live[key] for key in ("send_lateness_p50_s", "send_lateness_p99_s")}
    return ours | lateness | {"invalid": live["invalid"]}


def main() -> None:
    """Start the server, play the rounds, write the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm", default="vllm", help="the command")
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=Path("vllm_bench_serve.json"))
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    options = live_options({"vllm": arguments.vllm, "model": arguments.model, "serve": SERVE})
    server = VLLMServer(options, scenario_of(1.0).engine)
    load = {name: getattr(arguments, name) for name in LOAD}
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server.start(folder / "server.log")
        try:
            for seed in range(arguments.rounds):
                theirs = bench_serve(arguments, server.url, seed, folder)
                sent_s, ttft_s, latency_s, tokens = (
                    np.array(theirs[key], np.float64)
                    for key in ("start_times", "ttfts", "latencies", "output_lens")
                )
                row = {
                    "seed": seed,
                    "vllm_bench_serve": measures(
                        sent_s, sent_s + ttft_s, sent_s + latency_s, tokens
                    ),
                    "live": [
                        replay(server.url, sent_s, theirs, folder / f"live-{seed}-{again}")
                        for again in range(2)
                    ],
                }
                rounds.append(row)
                print(json.dumps(row), flush=True)
                content = {"load": load, "rounds": rounds}
                arguments.out.write_text(json.dumps(content, indent=1) + "\n")
        finally:
            server.stop()


if __name__ == "__main__":
    main()
