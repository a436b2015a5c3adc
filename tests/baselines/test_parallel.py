"""Processes that joblib keeps between calls."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vllm_tenant_tuning.baselines.parallel import run_here


def write(name: str) -> int:
    Path(name).write_text("here")
    return os.getpid()


def test_relative_paths_are_the_callers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[int] = set()
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        monkeypatch.chdir(folder)
        used |= set(run_here(write, [(f"{i}.txt",) for i in range(4)], workers=2))
        assert {path.name for path in folder.iterdir()} == {f"{i}.txt" for i in range(4)}
    assert os.getpid() not in used
