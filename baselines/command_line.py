"""What the parsers of all commands share."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib.metadata import PackageNotFoundError, requires
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


def explain_missing(error: ImportError) -> str:
    """The error's message; where a library of an extra is missing, with what installs it."""
    try:
        wanted = requires("vllm-tenant-tuning") or []
    except PackageNotFoundError:  # imported from a folder, without having been installed
        wanted = []
    library = re.escape((error.name or "").partition(".")[0].replace("_", "-"))
    extras = [
        found[1]
        for text in wanted
        if (found := re.match(rf"{library}\b(?!-).*extra == .(\w+)", text, re.IGNORECASE))
    ]
    if not library or not extras:
        return str(error)
    extra = "report" if "report" in extras else extras[0]
    return (
        f"this command needs the extra '{extra}' ({error}): "
        f"pip install 'vllm-tenant-tuning[{extra}]', or pip install -e '.[{extra}]' in a clone"
    )


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
