"""Arrivals, token lengths and traces: the requests of an episode."""

from vllm_tenant_tuning.workload.stream import RequestStream
from vllm_tenant_tuning.workload.traces import TraceError
from vllm_tenant_tuning.workload.workload import Workload

__all__ = ["RequestStream", "TraceError", "Workload"]
