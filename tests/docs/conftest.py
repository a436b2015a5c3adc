"""The pages' tests play with the servers that other tests have."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "agents"), str(TESTS / "live")]
