"""The command line: `vllm-tenant-tuning COMMAND`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from vllm_tenant_tuning.backends import BACKENDS, BackendError
from vllm_tenant_tuning.baselines.benchmark_cli import add_benchmark
from vllm_tenant_tuning.baselines.command_line import RAY_HELP, explain_missing, parse_seeds
from vllm_tenant_tuning.baselines.live_cli import (
    add_protocol,
    add_server_options,
    checked_server_options,
    server_options,
)
from vllm_tenant_tuning.baselines.profile_cli import add_calibrate, add_validate
from vllm_tenant_tuning.baselines.tuning_cli import add_tune
from vllm_tenant_tuning.family import ScenarioFamily
from vllm_tenant_tuning.scenario import family_names, load_scenario, scenario_names

LLM_OPTIONS: Final[dict[str, tuple[str, type, str, str]]] = {
    "--base-url": ("base_url", str, "URL", "of an OpenAI-compatible API, such as http://HOST/v1"),
    "--model": ("model", str, "NAME", "that the endpoint knows"),
    "--api-key-env": ("api_key_env", str, "VAR", "environment variable that holds the key"),
    "--timeout-s": ("timeout_s", float, "S", "of a decision (default: the control interval)"),
    "--decision-latency-s": (
        "decision_latency_s",
        float,
        "S",
        "what a decision costs in simulation (default: measured)",
    ),
}
"""What `evaluate` can set of an LLM's configuration: key, type, placeholder, meaning."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, or 1 where `protocol` has episodes to repeat, or 2 with one line on standard error when
        the input is refused, or 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["train"]:  # has its own parser, shared with train.py
        from vllm_tenant_tuning.baselines.training import main as train

        return train(arguments[1:])
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except ImportError as error:
        print(f"error: {explain_missing(error)}", file=sys.stderr)
        return 2
    except (ValueError, OSError, BackendError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-tenant-tuning",
        description="Online tuning of per-tenant admission concurrency on a shared vLLM server.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    scenarios = commands.add_parser("scenarios", help="list, show or check scenarios")
    actions = scenarios.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="one scenario a line, its name first").set_defaults(
        run=_list_scenarios
    )
    show = actions.add_parser("show", help="print a scenario, defaults filled in")
    show.add_argument("name", metavar="NAME")
    show.set_defaults(run=_show_scenario)
    check = actions.add_parser("check", help="check a scenario file")
    check.add_argument("file", metavar="FILE")
    check.set_defaults(run=_check_scenario)

    commands.add_parser(
        "train", help="train a policy and evaluate it beside the rules (same as train.py)"
    )

    evaluate = commands.add_parser("evaluate", help="compare policies on a scenario")
    evaluate.add_argument(
        "--policies",
        default=None,
        metavar="A,B,...",
        help="comma-separated: best_static, or what `policies` lists (default: "
        "static caps and the study's rules)",
    )
    evaluate.add_argument(
        "--scenario", default="study", metavar="NAME|FILE", help="default: %(default)s"
    )
    evaluate.add_argument(
        "--members",
        action="store_true",
        help="play each member of a family by itself, records and report in a folder of DIR",
    )
    evaluate.add_argument(
        "--seeds", default="0:100", metavar="A:B", help="A to B - 1 (default: %(default)s)"
    )
    evaluate.add_argument("--out", required=True, metavar="DIR", help="records and report")
    evaluate.add_argument("--trace-dir", metavar="DIR", help="folder of the trace files")
    evaluate.add_argument("--workers", type=int, metavar="N", help="processes (default: cores)")
    evaluate.add_argument(
        "--backend", default="sim", choices=BACKENDS, help="simulation (default) or a live server"
    )
    evaluate.add_argument("--ray", metavar="ADDRESS", help=RAY_HELP)
    evaluate.add_argument(
        "--reference", metavar="POLICY", help="compared with (default: best static, or the first)"
    )
    add_server_options(evaluate)
    llm = evaluate.add_argument_group("LLMs", "set keys of every llm policy's configuration")
    for option, (_, kind, metavar, meaning) in LLM_OPTIONS.items():
        llm.add_argument(option, type=kind, metavar=metavar, help=meaning)
    llm.add_argument(
        "--price-per-million",
        type=float,
        nargs=2,
        metavar=("PROMPT", "COMPLETION"),
        help="USD for a million tokens of each",
    )
    llm.add_argument(
        "--replay", metavar="DIR", help="answers from the --out of an earlier run, no network"
    )
    evaluate.set_defaults(run=_evaluate)
    add_benchmark(commands)
    add_protocol(commands)

    commands.add_parser("policies", help="list the policies").set_defaults(run=_list_policies)

    study = commands.add_parser("study", help="reproduce the study's table")
    study.add_argument("--seeds", type=int, default=20, metavar="N", help="0 to N - 1")
    study.add_argument("--json", metavar="FILE", help="write the result there too")
    study.set_defaults(run=_study)

    bench = commands.add_parser("bench", help="measure speed beside CartPole-v1")
    bench.add_argument(
        "--scenario", default="study", metavar="NAME|FILE", help="default: %(default)s"
    )
    bench.add_argument(
        "--num-envs",
        type=int,
        default=1024,
        metavar="N",
        help="of the vector environment (default: %(default)s)",
    )
    bench.add_argument("--json", metavar="FILE", help="write the result there too")
    bench.add_argument(
        "--scaling", metavar="FILE", help="measure how the engine's cost grows, and draw it there"
    )
    bench.set_defaults(run=_bench)

    add_tune(commands)
    add_calibrate(commands)
    add_validate(commands)
    return parser


def _list_scenarios(options: argparse.Namespace) -> int:
    names = scenario_names() + family_names()
    width = max(map(len, names))
    for name in names:
        print(f"{name:{width}}  {load_scenario(name).question}")
    return 0


def _show_scenario(options: argparse.Namespace) -> int:
    scenario = load_scenario(options.name)
    content = scenario.model_dump(mode="json")
    print(yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100), end="")
    return 0


def _check_scenario(options: argparse.Namespace) -> int:
    scenario = load_scenario(Path(options.file))
    print(
        f"{options.file}: scenario '{scenario.name}' is fine: {scenario.n_tenants} tenants, "
        f"{scenario.control.n_steps} control intervals"
    )
    return 0


def _list_policies(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.agents import POLICY_FORMS

    forms = {"best_static": "the best static caps of a grid, on training seeds"} | POLICY_FORMS
    width = max(map(len, forms))
    for form, meaning in forms.items():
        print(f"{form:{width}}  {meaning}")
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.baselines.comparison import compare, print_members
    from vllm_tenant_tuning.baselines.distributed import RayCluster
    from vllm_tenant_tuning.baselines.evaluate import RULE_POLICIES

    if options.ray is not None and options.workers is not None:
        raise ValueError("--workers: accepted are processes of this machine, without --ray")
    live = options.backend == "live"
    if not live and server_options(options):
        raise ValueError("--url, --serve, --live: accepted with --backend live")
    policies = options.policies.split(",") if options.policies else list(RULE_POLICIES)
    scenario = load_scenario(options.scenario)
    tasks = {"": scenario}
    if options.members:
        if not isinstance(scenario, ScenarioFamily) or not scenario.members:
            raise ValueError(
                f"--members: got '{scenario.name}', which has none; accepted is a family with "
                f"members, such as {', '.join(family_names())}"
            )
        tasks = {name: scenario.member(name) for name in scenario.members}
    summaries = {
        name: compare(
            _with_llm_options(policies, options),
            task,
            parse_seeds(options.seeds),
            Path(options.out) / name,
            backend=options.backend,
            backend_options=checked_server_options(options) if live else None,
            reference=options.reference,
            trace_dir=options.trace_dir,
            workers=options.workers,
            cluster=None if options.ray is None else RayCluster(options.ray),
        )
        for name, task in tasks.items()
    }
    if options.members:
        print_members(summaries)
    return 0


def _with_llm_options(policies: Sequence[str], options: argparse.Namespace) -> list[str]:
    """The policies' texts, those of LLMs with the options of the command line."""
    given = {
        key: getattr(options, option[2:].replace("-", "_"))
        for option, (key, *_) in LLM_OPTIONS.items()
    }
    if options.price_per_million is not None:
        prompt, completion = options.price_per_million
        given["price_per_million_prompt_tokens_usd"] = prompt
        given["price_per_million_completion_tokens_usd"] = completion
    if all(value is None for value in given.values()) and options.replay is None:
        return list(policies)
    if not any(text.partition(":")[0] == "llm" for text in policies):
        raise ValueError("policies: options of LLMs are given, and none of the policies is 'llm'")
    from vllm_tenant_tuning.baselines.evaluate import llm_text

    return [
        llm_text(text, given, options.replay) if text.partition(":")[0] == "llm" else text
        for text in policies
    ]


def _study(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.baselines.comparison import progress_bar, study_tables
    from vllm_tenant_tuning.baselines.study import run_study

    with progress_bar("playing") as on_progress:
        result = run_study(options.seeds, on_progress)
    study_tables(result)
    _write_json(options.json, result)
    return 0


def _bench(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.baselines.bench import PPO_ENVS, run_bench
    from vllm_tenant_tuning.baselines.bench_engine import engine_scaling, plot_engine_scaling

    result = run_bench(options.scenario, options.num_envs)
    for name in ("cartpole", "vllm_tenant_tuning"):
        rates = result[name]
        print(
            f"{name:20} scalar {rates['scalar_steps_per_s']:>12,.0f} steps/s   "
            f"vector of {result['num_envs']} {rates['vector_steps_per_s']:>12,.0f} steps/s"
        )
    print(f"ours over CartPole-v1: scalar {result['scalar_ratio']:.2f}, vector ", end="")
    print(f"{result['vector_ratio']:.2f}")
    if result["ppo"] is not None:
        print(
            f"PPO with {PPO_ENVS} environments: {result['ppo']['timesteps_per_s']:,.0f} "
            f"timesteps/s, the environment takes {result['ppo']['environment_share']:.1%}"
        )
    engine, vector = result["engine"], result["engine"]["vector"]
    print(
        f"engine, {engine['profile']}, 1024/256 tokens, one core: "
        f"{engine['real_time_ratio']:,.0f} times real time at 20 requests/s, "
        f"{engine['real_time_ratio_5_per_s']:,.0f} at 5"
    )
    print(
        f"{vector['scenario']}, {vector['num_envs']} environments: "
        f"{vector['steps_per_s']:,.0f} steps/s, "
        f"{vector['bytes_per_environment'] / 1e6:.1f} MB for each"
    )
    if options.scaling:
        result["engine"]["scaling"] = engine_scaling()
        plot_engine_scaling(result["engine"]["scaling"], options.scaling)
    _write_json(options.json, result)
    return 0


def _write_json(path: str | None, content: dict[str, Any]) -> None:
    if path is not None:
        Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
