"""A real vLLM on the CPU for the live tests; they skip where it is not installed.

`python3 benchmarks/cpu_server/install_vllm.py` installs it into `.venv-vllm`, and
`.venv-vllm/bin/python benchmarks/cpu_server/make_model.py .venv-vllm/model` makes its model; the
environment variables VLLM_BIN and VLLM_MODEL name others.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

if os.environ.get("PYTEST_XDIST_WORKER"):
    # They keep wall-clock time, and need the machine for themselves: pytest tests/live -n 0.
    collect_ignore_glob = ["test_*.py"]
READY_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Installation:
    """A vLLM and a model: keyword arguments of the live backend."""

    vllm: str
    model: str

    @property
    def options(self) -> dict[str, object]:
        return {
            "vllm": self.vllm,
            "model": self.model,
            "serve": ("--dtype", "bfloat16", "--enforce-eager", "--served-model-name", "tiny"),
            "ready_timeout_s": READY_TIMEOUT_S,
        }


@pytest.fixture(scope="session")
def vllm() -> Installation:
    """The installed vLLM; skips without one, and beside other test processes.

    One vLLM at a time on two cores: a second one may never get ready.
    """
    binary = os.environ.get("VLLM_BIN", str(ROOT / ".venv-vllm" / "bin" / "vllm"))
    model = os.environ.get("VLLM_MODEL", str(ROOT / ".venv-vllm" / "model"))
    if not Path(binary).exists() or not Path(model).exists():
        pytest.skip("no vLLM: see tests/live/conftest.py")
    if os.environ.get("PYTEST_XDIST_WORKER"):
        pytest.skip("a real vLLM needs the machine for itself: pytest tests/live -n 0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    return Installation(binary, model)
