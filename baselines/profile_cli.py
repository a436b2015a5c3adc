"""The command line's engine profiles: the commands `calibrate` and `validate`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from vllm_tenant_tuning.baselines.command_line import command_line, numbers, option_of

CALIBRATE_OPTIONS: Final[dict[str, tuple[str, type, str, str]]] = {
    "--name": ("name", str, "NAME", "of the profile"),
    "--description": ("description", str, "TEXT", "of model and server, a line"),
    "--gpu": ("gpu", str, "TEXT", "the hardware"),
    "--num-gpu-blocks": ("kv_cache.num_gpu_blocks", int, "N", "KV cache blocks"),
    "--block-size": ("kv_cache.block_size", int, "TOKENS", "of a KV cache block"),
    "--max-num-seqs": ("scheduler.max_num_seqs", int, "N", "as vLLM's own"),
    "--max-num-batched-tokens": (
        "scheduler.max_num_batched_tokens",
        int,
        "TOKENS",
        "as vLLM's own",
    ),
    "--max-model-len": ("scheduler.max_model_len", int, "TOKENS", "as vLLM's own"),
    "--request-s": ("frontend.request_s", float, "S", "the API server's work for a request"),
    "--prompt-token-s": ("frontend.prompt_token_s", float, "S", "and for a prompt token"),
    "--delay-s": ("frontend.delay_s", float, "S", "what passes after that work"),
    "--gpu-memory-utilization": ("gpu_memory_utilization", float, "SHARE", "0 to 1"),
}
"""What a grid of step times cannot give: the profile's field, type, placeholder, meaning."""


def add_calibrate(commands: Any) -> None:
    """Add the command `calibrate` to the parser's subparsers."""
    calibrate: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        help="fit an engine profile to measured step times, or to a live server",
        description="Fit an engine profile. A grid of step times (in ms) needs --template or all "
        "the options for the profile; a live server tells most of them itself.",
    )
    measured = calibrate.add_mutually_exclusive_group(required=True)
    measured.add_argument("--grid", metavar="FILE", help="measured step times, JSON")
    measured.add_argument("--url", metavar="URL", help="measure this running vLLM server")
    measured.add_argument(
        "--records",
        action="append",
        metavar="FILE",
        help="what an earlier --url measured, without the server; may be repeated",
    )
    calibrate.add_argument("--out", required=True, metavar="PROFILE", help="YAML file to write")
    calibrate.add_argument("--model", metavar="NAME", help="of the grid, or of the server")
    calibrate.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="of all batches, with --url (default: %(default)s)",
    )
    calibrate.add_argument(
        "--template", metavar="NAME|PROFILE", help="a profile for what no option gives"
    )
    calibrate.add_argument(
        "--sequence-ms",
        type=float,
        metavar="MS",
        help="a served engine's host time per decoding sequence, in place of the fitted one",
    )
    given = calibrate.add_argument_group("the profile's", "these win over what was measured")
    for option, (_, kind, metavar, meaning) in CALIBRATE_OPTIONS.items():
        given.add_argument(option, type=kind, metavar=metavar, help=meaning)
    calibrate.set_defaults(run=_calibrate)


def add_validate(commands: Any) -> None:
    """Add the command `validate` to the parser's subparsers."""
    validate: argparse.ArgumentParser = commands.add_parser(
        "validate", help="play the same requests in simulation and on a live server"
    )
    validate.add_argument("--scenario", required=True, metavar="NAME|FILE")
    validate.add_argument("--profile", required=True, metavar="NAME|FILE", help="for simulation")
    validate.add_argument("--out", required=True, metavar="DIR", help="records, summary, figure")
    validate.add_argument(
        "--url", metavar="URL", help="of the server; without it, episodes that DIR holds"
    )
    validate.add_argument("--model", metavar="NAME", help="on the server (default: the first)")
    validate.add_argument(
        "--caps",
        action="append",
        default=[],
        metavar="A,B,...",
        help="constant caps, one a tenant; may be repeated (default: the scenario's)",
    )
    validate.add_argument(
        "--loads",
        default="1",
        metavar="X,Y,...",
        help="factors on all arrival rates (default: %(default)s)",
    )
    validate.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the requests (default: %(default)s)"
    )
    validate.add_argument("--episode-s", type=float, metavar="S", help="(default: the scenario's)")
    validate.add_argument(
        "--dry-run", action="store_true", help="say what it would take, and play nothing"
    )
    validate.set_defaults(run=_validate)


def _calibrate(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.baselines.calibrate import calibrate

    if options.url is None:
        options.rounds = None
    elif options.rounds < 1:
        raise ValueError(f"--rounds: got {options.rounds}; accepted is at least 1")
    common: dict[str, Any] = {
        "template": options.template,
        "given": {
            CALIBRATE_OPTIONS[option_of(name)][0]: value
            for name, value in vars(options).items()
            if value is not None and option_of(name) in CALIBRATE_OPTIONS
        },
        "command": command_line(options),
    }
    out = Path(options.out)
    if options.grid is not None:
        calibrate(options.grid, out, model=options.model, sequence_ms=options.sequence_ms, **common)
        return 0
    if options.sequence_ms is not None:
        raise ValueError("--sequence-ms: accepted is with --grid; a live server shows its own")
    from vllm_tenant_tuning.baselines.calibrate_live import calibrate_server, fit_trials

    if options.records is not None:
        fit_trials([Path(file) for file in options.records], out, **common)
    else:
        calibrate_server(options.url, out, model=options.model, rounds=options.rounds, **common)
    return 0


def _validate(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.baselines.validate import validate

    validate(
        options.scenario,
        options.profile,
        Path(options.out),
        url=options.url,
        model=options.model,
        loads=numbers("--loads", options.loads, float),
        caps=[numbers("--caps", text, int) for text in options.caps],
        seed=options.seed,
        episode_s=options.episode_s,
        dry_run=options.dry_run,
        command=command_line(options),
    )
    return 0
