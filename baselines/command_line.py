"""What the parsers of all commands share."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, Final

RAY_HELP: Final = (
    "play on this Ray cluster: auto, HOST:PORT or ray://HOST:PORT; its machines need this package, "
    "traces and models are sent to them"
)


def parse_seeds(text: str) -> range:
    """The seeds `A:B` stand for, A to B - 1, inside the evaluation's 0 to 999.

    Raises:
        ValueError: not of that form, empty, or out of range.
    """
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last) <= 1000):
        raise ValueError(f"seeds: got '{text}'; accepted is A:B with 0 <= A < B <= 1000")
    return range(int(first), int(last))


def command_line(options: argparse.Namespace) -> str:
    """What was typed, with the defaults, for records to name."""
    words = [
        word
        for name, value in vars(options).items()
        if value is not None and name not in ("command", "run", "dry_run")
        for item in (value if isinstance(value, list) else [value])
        for word in (option_of(name), str(item))
    ]
    return shlex.join(["vllm-tenant-tuning", options.command, *words])


def numbers(option: str, text: str, kind: type) -> list[Any]:
    """The comma-separated numbers of an option.

    Raises:
        ValueError: not such numbers.
    """
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option}: got '{text}'; accepted are comma-separated numbers") from error


def option_of(name: str) -> str:
    """The option that gives the parsed argument of this name."""
    return f"--{name.replace('_', '-')}"
