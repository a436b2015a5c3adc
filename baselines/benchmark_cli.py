"""The command `benchmark`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from vllm_tenant_tuning.baselines.suite import load_suite

_MODELS: Final = "baselines/results"
_SUITE: Final = "default"


def add_benchmark(commands: Any) -> None:
    """Add the command `benchmark`.

    Args:
        commands: the parser's subparsers.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        "benchmark", help="play a suite of scenarios and policies, and report on it"
    )
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="raw records and the page; resumed"
    )
    parser.add_argument("--suite", metavar="NAME|FILE", help=f"default: {_SUITE}")
    parser.add_argument("--seeds", metavar="A:B", help="A to B - 1 (default: the suite's)")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: cores)")
    parser.add_argument(
        "--models",
        metavar="DIR",
        help=f"trained models, each in a folder of its scenario's name (default: {_MODELS})",
    )
    parser.add_argument(
        "--markdown", metavar="FILE", help="tables as Markdown (default: in the folder of --out)"
    )
    parser.add_argument(
        "--page-url", metavar="URL", help="of the published page, for a link in the Markdown"
    )
    parser.add_argument(
        "--report-only", action="store_true", help="from the records of --out, without playing"
    )
    parser.set_defaults(run=_benchmark)


def _benchmark(options: argparse.Namespace) -> int:
    from vllm_tenant_tuning.baselines.benchmark import play_suite
    from vllm_tenant_tuning.baselines.benchmark_report import write_benchmark

    out_dir = Path(options.out)
    if options.report_only:
        for name in ("suite", "seeds", "workers", "models"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name}: accepted when something is played; with --report-only the "
                    "records say it"
                )
    else:
        if options.models is not None and not Path(options.models).is_dir():
            raise ValueError(
                f"--models: got '{options.models}'; accepted is a folder of trained models"
            )
        suite = load_suite(options.suite or _SUITE)
        if options.seeds is not None:
            suite = suite.with_seeds(options.seeds)
        play_suite(
            suite, out_dir, models_dir=Path(options.models or _MODELS), workers=options.workers
        )
    markdown = Path(options.markdown) if options.markdown else None
    for file in write_benchmark(out_dir, markdown, options.page_url):
        print(file)
    return 0
