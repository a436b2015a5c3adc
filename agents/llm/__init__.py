"""Large language models as controllers, on any OpenAI-compatible endpoint."""

from vllm_tenant_tuning.agents.llm.config import (
    AgentSource,
    LLMConfig,
    agent_content,
    agent_text,
    load_agent,
)
from vllm_tenant_tuning.agents.llm.failures import Failure
from vllm_tenant_tuning.agents.llm.policy import LLMPolicy
from vllm_tenant_tuning.agents.llm.transcript import ReplayError, agent_folder, transcript_path

__all__ = [
    "AgentSource",
    "Failure",
    "LLMConfig",
    "LLMPolicy",
    "ReplayError",
    "agent_content",
    "agent_folder",
    "agent_text",
    "load_agent",
    "transcript_path",
]
