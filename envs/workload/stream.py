"""The requests of one episode, as plain arrays that every backend plays alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_tenant_tuning.scenario import Scenario


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
        patience_s: of each tenant, None for ever; without it (None) they are the scenario's.
        drawn: what a family drew for this episode, values by tenant and parameter.
    """

    offsets: npt.NDArray[np.int64]
    arrival_s: npt.NDArray[np.float64]
    prompt_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    service_s: npt.NDArray[np.float64]
    patience_s: tuple[float | None, ...] | None = None
    drawn: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

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

    def patience_under(self, scenario: Scenario) -> tuple[float | None, ...]:
        """Seconds that the requests of each tenant wait at the gate, None for ever.

        Args:
            scenario: the task, for a stream that does not say.
        """
        if self.patience_s is None:
            return tuple(tenant.patience_s for tenant in scenario.tenants)
        return self.patience_s
