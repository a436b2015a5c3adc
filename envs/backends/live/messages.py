"""What the backend and its load process say to each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.workload import RequestStream


@dataclass(frozen=True)
class Start:
    """Begin an episode."""

    url: str
    stream: RequestStream
    caps: npt.NDArray[np.int64]
    salt: int
    warm_up: bool
    folder: Path
    note: dict[str, Any]


@dataclass(frozen=True)
class Advance:
    """Put the caps in force and observe at the end of the control interval."""

    caps: npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fault:
    """End the episode for a reason that only the backend can see. It has no answer of its own:
    the interval that runs, or the next one, ends at once with it.
    """

    reason: str
    detail: str


@dataclass(frozen=True)
class Outcomes:
    """Ask what has become of every request."""


@dataclass(frozen=True)
class Observed:
    """The answer to `Start` and `Advance`.

    Attributes:
        tenants: (n_tenants,) of `TENANT_DTYPE`.
        cluster: of `CLUSTER_DTYPE`.
        report: what the environment gives as `info["live"]`.
        fault: why the episode cannot go on; empty if it can.
    """

    tenants: npt.NDArray[np.void]
    cluster: npt.NDArray[np.void]
    report: dict[str, Any]
    fault: str


@dataclass(frozen=True)
class Refused:
    """The answer to a command that could not be carried out."""

    message: str
