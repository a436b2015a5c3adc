"""Code that runs in a process of its own, beside the tests' modules."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def printed_elsewhere(code: str) -> str:
    """What code prints in another process that can import the modules of this folder."""
    code = f"import sys; sys.path.insert(0, sys.argv[1])\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
