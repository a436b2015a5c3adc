"""What an LLM agent is told: the endpoint, the prompt, the bounds, the prices."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import Field, ValidationError, model_validator

from vllm_tenant_tuning.schema import (
    Model,
    NonNegativeSeconds,
    PositiveSeconds,
    explain_errors,
    packaged_names,
    read_yaml,
)

OutputForm = Literal["json_schema", "tool", "text"]
"""How an answer is asked for: `response_format`, a forced tool call, or the prompt alone."""

Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Note = Annotated[str, Field(max_length=200)]

MIN_KEY_CHARACTERS = 8
NO_KEY = "EMPTY"
"""What is sent where there is no key, as vLLM's documentation has it."""


class LLMConfig(Model):
    """One LLM agent.

    `model`: the name that the endpoint knows.
    `base_url`: of an OpenAI-compatible API, up to and with `/v1`; not needed for a replay.
    `name`: how tables call the agent; by default `llm:MODEL`.
    `api_key_env`: the environment variable that holds the key; none: `EMPTY` is sent.
    `output`: the form of output to ask for; `auto` tries them in the order of `OutputForm` until
    the endpoint knows one, anew in every episode.
    `timeout_s`: of a whole decision, the retry included; none: the control interval, which it
    must not exceed.
    `decision_latency_s`: what a decision's time costs in simulation: `measured`, or a number.
    `max_tokens`: of an answer, sent as `token_limit_parameter`.
    `temperature`: none: not sent, for endpoints that refuse it.
    `max_response_bytes`: a longer response is cut off and counts as a failure.
    `history_intervals`: how many control intervals before the last one the prompt shows.
    `reason`: ask for a sentence of reasoning before the changes; it costs time.
    `tenant_notes`: free text about tenants, by name; data in the prompt.
    `price_per_million_prompt_tokens_usd`, `price_per_million_completion_tokens_usd`: both or
    neither.
    `extra_body`: further keys of the request, such as vLLM's `chat_template_kwargs`.
    `system_template`, `user_template`, `retry_template`: Jinja2 files, beside the configuration
    or else packaged.
    `replay`: a folder of transcripts to take the answers from, without any network.
    """

    model: Annotated[str, Field(min_length=1, max_length=200)]
    base_url: str | None = None
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] | None = None
    output: Literal["auto"] | OutputForm = "auto"
    timeout_s: PositiveSeconds | None = None
    decision_latency_s: Literal["measured"] | NonNegativeSeconds = "measured"
    max_tokens: Annotated[int, Field(ge=1, le=100_000)] = 128
    token_limit_parameter: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = 0.0
    max_response_bytes: Annotated[int, Field(ge=1024, le=2**24)] = 2**16
    history_intervals: Annotated[int, Field(ge=0, le=1000)] = 4
    reason: bool = False
    tenant_notes: dict[str, Note] = Field(default_factory=dict)
    price_per_million_prompt_tokens_usd: Price | None = None
    price_per_million_completion_tokens_usd: Price | None = None
    extra_body: dict[str, Any] = Field(default_factory=dict)
    system_template: str = "system.j2"
    user_template: str = "user.j2"
    retry_template: str = "retry.j2"
    replay: str | None = None

    @property
    def label(self) -> str:
        """How tables call the agent."""
        return self.name or f"llm:{self.model}"

    @property
    def forms(self) -> tuple[OutputForm, ...]:
        """The forms of output to try, in order."""
        return ("json_schema", "tool", "text") if self.output == "auto" else (self.output,)

    def api_key(self) -> str | None:
        """The key from its environment variable; None where none is named.

        Raises:
            ValueError: the variable is missing, or so short that it cannot be kept out of
                transcripts.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if len(key) < MIN_KEY_CHARACTERS:
            raise ValueError(
                f"api_key_env: the environment variable {self.api_key_env} holds "
                f"{len(key)} characters; a key has at least {MIN_KEY_CHARACTERS} (an endpoint that "
                "needs none is asked without api_key_env)"
            )
        return key

    @model_validator(mode="after")
    def _whole(self) -> LLMConfig:
        if self.base_url is None and self.replay is None:
            raise ValueError(
                "base_url is missing: an agent needs an endpoint (--base-url), or the answers of "
                "an earlier run (--replay)"
            )
        if self.base_url is not None:
            url = urlsplit(self.base_url)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError("base_url: accepted is such as http://localhost:8000/v1")
            if url.username or url.password or url.query or url.fragment:
                raise ValueError(
                    "base_url: user, password, query and fragment are not accepted, because the "
                    "address is recorded; a key is named by api_key_env"
                )
        prices = (
            self.price_per_million_prompt_tokens_usd,
            self.price_per_million_completion_tokens_usd,
        )
        if (prices[0] is None) != (prices[1] is None):
            raise ValueError("prices of prompt and completion tokens are given both or neither")
        return self


@dataclass(frozen=True)
class AgentSource:
    """A configuration and the text of its templates.

    Attributes:
        config: the configuration.
        system, user, retry: Jinja2 templates.
    """

    config: LLMConfig
    system: str
    user: str
    retry: str


def agent_text(text: str, options: Mapping[str, Any]) -> str:
    """The text of a policy, with keys of its configuration set.

    Args:
        text: `llm`, `llm:CONFIG` or `llm:CONFIG?key=value&...`.
        options: by the configuration's keys; None is left out, what the text has is overridden.
    """
    source, given = _split(text)
    merged = given | {key: str(value) for key, value in options.items() if value is not None}
    return f"llm:{source}" + (f"?{urlencode(merged)}" if merged else "")


def load_agent(text: str) -> AgentSource:
    """Read an agent's configuration and templates.

    Args:
        text: as for `agent_text`; CONFIG is a packaged name or the path of a YAML file.

    Raises:
        ValueError: a configuration or template that is missing or refused.
    """
    source, given = _split(text)
    packaged = resources.files("vllm_tenant_tuning.configs") / "agents"
    values = read_yaml("llm", source, {"agents": "a packaged configuration"}, ValueError)
    beside = None if source in packaged_names("agents") else Path(source).parent
    if not isinstance(values, dict):
        raise ValueError(f"llm {source}: expected a mapping of keys such as model and base_url")
    if "model" not in values | given:
        raise ValueError(
            f"llm {source}: model: missing; accepted is the name that the endpoint knows, from "
            "--model or in the configuration"
        )
    try:
        config = LLMConfig.model_validate(values | given)
    except ValidationError as error:
        raise ValueError(f"llm {source}: {explain_errors(error)}") from error
    templates = []
    for name in (config.system_template, config.user_template, config.retry_template):
        if beside is not None and (beside / name).is_file():
            templates.append(_read(beside / name))
        elif (packaged / name).is_file():
            templates.append((packaged / name).read_text(encoding="utf-8"))
        else:
            raise ValueError(
                f"llm {source}: no template '{name}' beside the configuration, nor a packaged one"
            )
    return AgentSource(config, *templates)


def agent_content(text: str) -> bytes:
    """All that an agent's decisions depend on, for a digest: configuration, templates, replay.

    Raises:
        ValueError: as `load_agent`.
    """
    agent = load_agent(text)
    parts = [agent.config.model_dump_json(), agent.system, agent.user, agent.retry]
    content = "\0".join(parts).encode()
    if agent.config.replay is not None:
        for file in sorted(Path(agent.config.replay).rglob("*.jsonl")):
            content += file.read_bytes()
    return content


def _split(text: str) -> tuple[str, dict[str, str]]:
    source, _, query = text.removeprefix("llm").removeprefix(":").partition("?")
    try:
        given = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
    except ValueError as error:
        raise ValueError(f"policy '{text}': accepted is llm:CONFIG?key=value&...") from error
    return source or "default", given


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"llm {file}: cannot be read: {error}") from error
