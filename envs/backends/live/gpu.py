"""What NVML says of the server's GPU: every reading that it refuses is unavailable, never fatal."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GPUReading:
    """One look at the GPU; NaN where NVML refuses.

    Attributes:
        memory_utilization: share of the memory in use, 0 to 1.
        utilization: share of the last sample period in which a kernel ran, 0 to 1.
        power_w: draw.
        energy_j: drawn since the driver was loaded.
    """

    memory_utilization: float = math.nan
    utilization: float = math.nan
    power_w: float = math.nan
    energy_j: float = math.nan


class GPUMonitor:
    """Reads one GPU through NVML.

    On MIG, in containers and without a GPU, NVML answers NotSupported or NoPermission, or is
    missing: each such reading becomes unavailable and is logged once.

    Args:
        index: which GPU; None: none is read (a remote server's).
        nvml: NVML's functions; None imports `pynvml`.

    Attributes:
        unavailable: by the names of `GPUReading`, why there is no reading.
    """

    def __init__(self, index: int | None, nvml: Any = None) -> None:
        self.unavailable: dict[str, str] = {}
        self._handle: Any = None
        self._nvml = nvml
        if index is None:
            self._refuse_all("not read: the server may be on another machine")
            return
        try:
            if nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
        except Exception as error:
            # NVML's own errors, a missing library or module: the run goes on without it
            self._refuse_all(f"{type(error).__name__}: {error}")

    def read(self) -> GPUReading:
        """Look at the GPU; may take some milliseconds."""
        if self._handle is None:
            return GPUReading()
        nvml, handle = self._nvml, self._handle

        def memory() -> float:
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            return float(info.used / info.total)

        return GPUReading(
            memory_utilization=self._try("memory_utilization", memory),
            utilization=self._try(
                "utilization", lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
            ),
            power_w=self._try("power_w", lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000),
            energy_j=self._try(
                "energy_j", lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
            ),
        )

    def close(self) -> None:
        """Let NVML go."""
        if self._handle is not None:
            self._handle = None
            self._nvml.nvmlShutdown()

    def _try(self, name: str, read: Callable[[], float]) -> float:
        if name in self.unavailable:
            return math.nan
        try:
            return read()
        except Exception as error:
            self._refuse(name, f"{type(error).__name__}: {error}")
            return math.nan

    def _refuse(self, name: str, why: str) -> None:
        self.unavailable[name] = why
        logger.warning("GPU %s is unavailable: %s", name, why)

    def _refuse_all(self, why: str) -> None:
        self.unavailable = dict.fromkeys(GPUReading.__dataclass_fields__, why)
        logger.info("GPU readings are unavailable: %s", why)
