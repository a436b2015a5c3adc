"""The fenced blocks of a page of the documentation, and how a test runs them.

A block of `bash` or `python` runs, in a process of its own and in one folder for the whole page.
Comments on the lines above a block say what is otherwise:

    <!-- file: NAME -->                      it is that file's content
    <!-- patch: FILE -->                     a diff of that file: hunks of whole lines, `@@` between
    <!-- shorter in the test: A => B; ... -->  it runs with B in the place of A
    <!-- needs a server -->                  its commands are parsed, or tried with --dry-run
    <!-- not run: WHY -->                    it is left alone

Blocks of other languages without such a comment are left alone too.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vllm_tenant_tuning.baselines import cli, training

ROOT = Path(__file__).resolve().parents[2]
DRY_RUN = ("protocol", "validate")
COMMAND = "vllm-tenant-tuning"
TIMEOUT_S = 600

_BLOCK = re.compile(r"((?:^<!--.*-->\n)*)^```(\w+)\n((?:.*\n)*?)```$", re.MULTILINE)
_NOTE = re.compile(r"<!-- ([^:]*?)(?:: (.*))? -->")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        place: page and line, for messages.
        language: after the fence.
        text: between the fences.
        notes: the comments above it, by what stands before their colon.
    """

    place: str
    language: str
    text: str
    notes: Mapping[str, str]


def blocks(page: Path) -> list[Block]:
    content = page.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(content):
        line = content[: match.start(3)].count("\n") + 1
        notes = {name: value or "" for name, value in _NOTE.findall(match[1])}
        unknown = set(notes) - {
            "file",
            "patch",
            "shorter in the test",
            "needs a server",
            "not run",
        }
        assert not unknown, f"{page.name}:{line}: unknown comments {unknown}"
        found.append(Block(f"{page.relative_to(ROOT)}:{line}", match[2], match[3], notes))
    return found


def play(
    page: Path, folder: Path, replaced: Mapping[str, str] | None = None, **environment: str
) -> int:
    """Run a page's blocks in order.

    Args:
        page: the Markdown file.
        folder: where files are written and commands run.
        replaced: texts that stand for others in every block, such as a server's address.
        environment: variables in place of the process's own.

    Returns:
        How many blocks ran, or were written, applied or parsed.
    """
    played = 0
    for block in blocks(page):
        text = _shorter(block)
        for old, new in (replaced or {}).items():
            text = text.replace(old, new)
        if "not run" in block.notes:
            assert block.notes["not run"], f"{block.place}: says not why"
            continue
        if "file" in block.notes:
            file = folder / block.notes["file"]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        elif "patch" in block.notes:
            apply_patch(folder / block.notes["patch"], text, block.place)
        elif "needs a server" in block.notes:
            for words in commands(text):
                try_without_server(words, folder, block.place, environment)
        elif block.language == "bash":
            run(["bash", "-euo", "pipefail", "-c", text], folder, block.place, environment)
        elif block.language == "python":
            run([sys.executable, "-c", text], folder, block.place, environment)
        else:
            continue
        played += 1
    return played


def run(words: list[str], folder: Path, place: str, environment: Mapping[str, str]) -> str:
    """Run a command and give its output; fails with all of it where the command does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    result = subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "PATH": path, "MPLBACKEND": "Agg", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert result.returncode == 0, f"{place}: exit status {result.returncode}\n{result.stdout}"
    return result.stdout


def commands(text: str) -> Iterator[list[str]]:
    """The words of each of our commands in a shell's text."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == [COMMAND]:
            yield words


def try_without_server(
    words: list[str], folder: Path, place: str, environment: Mapping[str, str]
) -> None:
    """A dry run where the command has one, else its options parsed."""
    if words[1] in DRY_RUN:
        run([*words, "--dry-run"], folder, place, environment)
        return
    try:
        if words[1] == "train":
            training._parser().parse_args(words[2:])
        else:
            cli._parser().parse_args(words[1:])
    except SystemExit as error:
        raise AssertionError(f"{place}: {shlex.join(words)} is not accepted") from error


def apply_patch(file: Path, diff: str, place: str) -> None:
    """Change a file as the hunks say; each must fit in one place and one only."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        if not lines:
            continue
        assert all(line[0] in " -+" for line in lines), f"{place}: lines begin with ' ', - or +"
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        content = file.read_text(encoding="utf-8")
        assert content.count(before) == 1, f"{place}: fits {content.count(before)} times:\n{before}"
        file.write_text(content.replace(before, after), encoding="utf-8")


def _shorter(block: Block) -> str:
    text = block.text
    for pair in filter(None, block.notes.get("shorter in the test", "").split("; ")):
        long, _, short = pair.partition(" => ")
        assert long in text, f"{block.place}: nothing to shorten: {pair}"
        text = text.replace(long, short)
    return text
