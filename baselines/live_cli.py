"""The command line's live server: its options, and the command `protocol`."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

import yaml

from vllm_tenant_tuning.baselines.command_line import parse_seeds
from vllm_tenant_tuning.baselines.live import COOL_DOWN_S, WARM_UP_S
from vllm_tenant_tuning.scenario import load_scenario

DEFAULT_POLICIES = "static,naive,differentiated"


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options that say where the live server is."""
    group = parser.add_argument_group("live server", "see docs/live.md")
    group.add_argument("--url", metavar="URL", help="of a running server, without /v1")
    group.add_argument(
        "--serve", metavar="MODEL", help="start `vllm serve MODEL` as the scenario's engine says"
    )
    group.add_argument(
        "--serve-arguments",
        metavar="TEXT",
        help="further arguments of `vllm serve`: --serve-arguments='--dtype bfloat16'",
    )
    group.add_argument("--vllm", metavar="COMMAND", help="that starts it (default: vllm)")
    group.add_argument(
        "--live",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="another option of the live backend, such as api_key_env=VAR; may be repeated",
    )


def server_options(options: argparse.Namespace) -> dict[str, Any]:
    """Fields of `LiveOptions` from the command line; none where none was given.

    Raises:
        ValueError: an option that is no KEY=VALUE, unknown, or given twice.
    """
    found: dict[str, Any] = {}
    if options.url is not None:
        found["url"] = options.url
    if options.serve is not None:
        found["model"] = options.serve
        try:
            found["serve"] = tuple(shlex.split(options.serve_arguments or ""))
        except ValueError as error:
            raise ValueError(
                f"--serve-arguments: got '{options.serve_arguments}'; accepted are a shell's "
                f"words: {error}"
            ) from error
    elif options.serve_arguments is not None or options.vllm is not None:
        name = "serve-arguments" if options.serve_arguments is not None else "vllm"
        raise ValueError(f"--{name}: accepted with --serve, which starts a server")
    if options.vllm is not None:
        found["vllm"] = options.vllm
    for text in options.live:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"--live: got '{text}'; accepted is KEY=VALUE")
        if key in found or key in ("url", "serve", "out_dir", "vllm"):
            raise ValueError(f"--live: {key} is set by another option, or twice")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--live: got '{text}'; accepted is KEY=VALUE in YAML") from error
    return found


def checked_server_options(options: argparse.Namespace) -> dict[str, Any]:
    """The same, checked before anything runs.

    Raises:
        ValueError: a missing server, an unknown option or a wrong value.
    """
    from vllm_tenant_tuning.backends.live.options import live_options

    found = server_options(options)
    if "url" not in found and "serve" not in found:
        raise ValueError(
            "live backend: got neither --url nor --serve; accepted is --url URL of a running "
            "server, or --serve MODEL to start one"
        )
    live_options(found)
    return found


def add_protocol(commands: Any) -> None:
    """Add the command `protocol`.

    Args:
        commands: the parser's subparsers.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "protocol", help="measure policies on a live server, in random order"
    )
    parser.add_argument(
        "--policies", default=DEFAULT_POLICIES, metavar="A,B,...", help="default: %(default)s"
    )
    parser.add_argument(
        "--scenario", default="cpu_chat_batch", metavar="NAME|FILE", help="default: %(default)s"
    )
    parser.add_argument(
        "--seeds", default="0:10", metavar="A:B", help="A to B - 1 (default: %(default)s)"
    )
    parser.add_argument("--out", required=True, metavar="DIR", help="records and report")
    parser.add_argument("--trace-dir", metavar="DIR", help="folder of the trace files")
    parser.add_argument("--reference", metavar="POLICY", help="default: best static, or the first")
    parser.add_argument("--order-seed", type=int, default=0, metavar="N", help="of the order")
    parser.add_argument(
        "--warm-up-s",
        type=float,
        default=WARM_UP_S,
        metavar="S",
        help="of load before each episode, not measured (default: %(default)g)",
    )
    parser.add_argument(
        "--cool-down-s",
        type=float,
        default=COOL_DOWN_S,
        metavar="S",
        help="of rest after each episode (default: %(default)g)",
    )
    parser.add_argument(
        "--hardware-note",
        default="",
        metavar="TEXT",
        help="what the server runs on, and how it was started; recorded",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="say what it would take, and in which order"
    )
    parser.add_argument(
        "--repeat-invalid",
        action="store_true",
        help="play again the episodes whose load was not delivered",
    )
    add_server_options(parser)
    parser.set_defaults(run=_protocol)


def _protocol(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.baselines.comparison import reference_label
    from vllm_tenant_tuning.baselines.protocol import (
        describe,
        look_ahead,
        make_protocol,
        measure,
    )

    protocol = make_protocol(
        options.policies.split(","),
        load_scenario(options.scenario),
        parse_seeds(options.seeds),
        order_seed=options.order_seed,
        warm_up_s=options.warm_up_s,
        cool_down_s=options.cool_down_s,
        options=checked_server_options(options),
        trace_dir=options.trace_dir,
    )
    reference = reference_label(options.reference, protocol.policies, protocol.contenders)
    out_dir = Path(options.out)
    repeat = options.repeat_invalid
    print(describe(protocol, look_ahead(protocol, out_dir, repeat_invalid=repeat)), flush=True)
    if options.dry_run:
        return 0
    whole = measure(
        protocol,
        out_dir,
        reference,
        hardware_note=options.hardware_note,
        repeat_invalid=repeat,
    )
    return 0 if whole else 1
