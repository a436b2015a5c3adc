"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# The first example of a test may compile.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Path of a file of the reference data beside the repository; skips where it is missing."""

    def find(name: str) -> Path:
        path = SHARED / name
        if not path.exists():
            pytest.skip(f"reference data not found: ../shared/{name}")
        return path

    return find
