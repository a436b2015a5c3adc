"""A page in a real browser, as wide as asked, looked at from outside."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

WIDTHS = (390, 1280)
"""A phone's and a desktop's, in CSS pixels."""


def look(page: Path, folder: Path, width: int, probe: str, budget_ms: int = 0) -> dict[str, Any]:
    """What a script sees of a page; fails on any message in the console.

    Args:
        page: the file.
        folder: for the profile and the frame around the page.
        width: of the page. An iframe is as narrow as asked; a headless window has a least width
            of its own.
        probe: the body of an asynchronous function of `page` (the document) and `view` (its
            window) that returns what is asked for. It runs outside the page, whose own policy
            need not let it.
        budget_ms: time that the page has, by its own clock; 0 for none after loading.

    Returns:
        What the probe returned, `title`, `width` and `overflow` (pixels that the page is too
        wide) besides.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium to look at the page with")
    frame = folder / f"frame-{width}.html"
    frame.write_text(
        f'<iframe src="{page.as_uri()}" style="width:{width}px;height:900px;border:0"></iframe>'
        """<script>
          onload = async () => {
            const view = frames[0], page = view.document, root = page.documentElement;
            const seen = await (async () => {"""
        + probe
        + """})();
            document.body.dataset.probe = JSON.stringify({
              title: page.title,
              width: root.clientWidth,
              overflow: root.scrollWidth - root.clientWidth,
              ...seen,
            });
          };
        </script>"""
    )
    arguments = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--no-first-run",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
        f"--user-data-dir={folder / 'profile'}",
        *([f"--virtual-time-budget={budget_ms}"] if budget_ms else []),
        "--dump-dom",
        frame.as_uri(),
    ]
    ended = subprocess.run(
        [chromium, *arguments], capture_output=True, text=True, timeout=300, check=True
    )
    found = re.search(r'data-probe="([^"]*)"', ended.stdout)
    assert found, ended.stdout[:500] + ended.stderr[-2000:]
    assert [line for line in ended.stderr.splitlines() if "CONSOLE" in line] == []
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    assert seen["width"] in (width, width - 15)  # less a scroll bar
    return seen
