"""Sphinx's configuration; the sources are the repository's own Markdown files.

From the repository's root: `sphinx-build -W --keep-going -c docs . build/docs`.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module, metadata
from typing import Any

project = "vllm-tenant-tuning"
release = metadata.version(project)
author = "The vllm-tenant-tuning authors"
copyright = author

extensions = ["myst_parser"]
root_doc = "docs/index"
# The root of the sources is the repository's, so that links between files hold here and there.
include_patterns = [
    "docs/**",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "baselines/results/README.md",
    "benchmarks/h200/README.md",
    "benchmarks/peers/README.md",
]
exclude_patterns = [".*", "build", "dist", "runs", "**/node_modules"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"{project} {release}"
html_extra_path = ["site"]
html_copy_source = False

DOCSTRING = re.compile(r"^<!-- docstring: (\S+)\.(\w+) -->$", re.MULTILINE)


def insert_docstrings(app: Any, docname: str, source: list[str]) -> None:
    """Put a docstring that is Markdown in the place of `<!-- docstring: MODULE.NAME -->`."""

    def docstring(found: re.Match[str]) -> str:
        return inspect.getdoc(getattr(import_module(found[1]), found[2])) or ""

    source[0] = DOCSTRING.sub(docstring, source[0])


def setup(app: Any) -> None:
    """Register what happens while pages are read."""
    app.connect("source-read", insert_docstrings)
