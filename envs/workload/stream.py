"""The requests of one episode, as plain arrays that every backend plays alike."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class RequestStream:
    """All requests of an episode, tenant by tenant, in order of arrival within a tenant.

    Tenant i owns the requests `offsets[i]:offsets[i + 1]`. With R requests in all:

    Attributes:
        offsets: (n_tenants + 1,) int64, starting at 0 and ending at R.
        arrival_s: (R,) float64, seconds from the start of the episode, in `[0, episode_s]`,
            not decreasing within a tenant.
        prompt_tokens: (R,) int64, at least 1.
        output_tokens: (R,) int64, at least 1.
        service_s: (R,) float64, service demand in seconds at full speed (the slots fidelity
            uses it in place of the tokens), above 0; NaN where the tenant states none.
    """

    offsets: npt.NDArray[np.int64]
    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    service_s: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def n_tenants(self) -> int:
        """Number of tenants."""
        return len(self.offsets) - 1

    @property
    def tenant(self) -> npt.NDArray[np.int64]:
        """(R,) int64, the tenant of every request."""
        return np.repeat(np.arange(self.n_tenants), np.diff(self.offsets))
