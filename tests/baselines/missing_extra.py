"""The command line where a library is not installed."""

from __future__ import annotations

import subprocess
import sys


def run_without(library: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run our command with these arguments in a process that cannot import the library."""
    code = (
        "import sys\n"
        f"sys.modules[{library!r}] = None\n"
        "from vllm_tenant_tuning.baselines.cli import main\n"
        f"raise SystemExit(main({arguments!r}))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
