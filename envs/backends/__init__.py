"""Backends: what plays an episode's requests under the caps and reports telemetry."""

from vllm_tenant_tuning.backends.base import (
    BACKENDS,
    Backend,
    BackendError,
    Outcome,
    RequestOutcomes,
    make_backend,
)

__all__ = ["BACKENDS", "Backend", "BackendError", "Outcome", "RequestOutcomes", "make_backend"]
