"""What a live backend can be told: where the server is, how it is started, how long to wait."""

from __future__ import annotations

import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from vllm_tenant_tuning.schema import Model, PositiveSeconds, explain_error

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class LiveOptions(Model):
    """Keyword arguments of `gym.make(..., backend="live", ...)`.

    One of `url` and `serve` is needed.

    `url`: of a running server, without `/v1`.
    `serve`: start one, with these further arguments of `vllm serve` (those that the scenario's
    engine section says are added); `model` is what to serve. It listens on `host` and `port`
    (none: a free one) and must be ready within `ready_timeout_s`; `vllm` is the command.
    `model`: the model's name on a running server (none: the first it lists).
    `out_dir`: the folder of the records, one folder for each episode (none: `runs/live-TIME`).
    `api_key_env`: the environment variable with the API key, if the server wants one.
    `prompt_token_ids`: prompts are random token ids from `[low, high)`.
    `salt`: of the prompts (none: another one in every run; it is recorded).
    `warmup_requests`: sent and forgotten before the first episode.
    `workers`: processes that send and receive. One does so beside gate and telemetry in the load
    process; more of them leave only those to it (a core takes about 20 thousand tokens a second).
    `scrape_interval_s`: how often `/metrics` and NVML are read.
    `gpu_index`: the GPU that NVML reads (none: GPU 0 for a server on this machine, else no GPU).
    `connect_timeout_s`, `read_timeout_s`: a connection not accepted, a stream silent for so long,
    fails the request.
    `failure_timeout_s`: the episode is truncated when the server answers nothing, or nothing but
    failures, for so long; `stall_timeout_s`: when it answers but generates no token for requests
    in flight.
    `agent_timeout_s`: the load stops when no step is asked for, so long after an interval.
    `reset_timeout_s`: how long `reset` waits for a healthy and idle server.
    """

    url: str | None = None
    serve: tuple[str, ...] | None = None
    model: str | None = None
    out_dir: str | None = None
    vllm: str = "vllm"
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=1, le=65535)] | None = None
    ready_timeout_s: PositiveSeconds = 600.0
    api_key_env: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = "VLLM_API_KEY"
    prompt_token_ids: tuple[int, int] = (100, 356)
    salt: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    warmup_requests: Annotated[int, Field(ge=0, le=10_000)] = 4
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    scrape_interval_s: PositiveSeconds = 1.0
    gpu_index: Annotated[int, Field(ge=0, le=1023)] | None = None
    connect_timeout_s: PositiveSeconds = 5.0
    read_timeout_s: PositiveSeconds = 120.0
    failure_timeout_s: PositiveSeconds = 10.0
    stall_timeout_s: PositiveSeconds = 30.0
    agent_timeout_s: PositiveSeconds = 300.0
    reset_timeout_s: PositiveSeconds = 60.0

    @field_validator("out_dir", "vllm", "model", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return value if value is None else str(value)

    @field_validator("url")
    @classmethod
    def _url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("accepted is http://HOST:PORT or https://HOST[:PORT]")
        if parts.username or parts.password or parts.query:
            raise ValueError("user, password and query are refused: name api_key_env instead")
        return re.sub(r"(/v1)?/*$", "", value)

    @field_validator("serve")
    @classmethod
    def _no_key(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if any(argument.partition("=")[0] == "--api-key" for argument in value or ()):
            raise ValueError(
                "--api-key is refused, records would hold it: name api_key_env instead"
            )
        return value

    @field_validator("prompt_token_ids")
    @classmethod
    def _enough_ids(cls, value: tuple[int, int]) -> tuple[int, int]:
        if not 0 <= value[0] < value[1] or value[1] - value[0] < 16:
            raise ValueError("accepted is (low, high) with 0 <= low and at least 16 ids")
        return value

    @model_validator(mode="after")
    def _one_server(self) -> LiveOptions:
        if (self.url is None) == (self.serve is None):
            raise ValueError(
                "one of url (a running server) and serve (arguments of 'vllm serve', () for "
                "none) is needed, and not both"
            )
        if self.serve is not None and self.model is None:
            raise ValueError("serve needs model: the name or folder of what to serve")
        return self

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine."""
        return self.serve is not None or urlsplit(self.url or "").hostname in LOOPBACK


def live_options(options: dict[str, Any]) -> LiveOptions:
    """Check keyword arguments.

    Raises:
        ValueError: an unknown one or a wrong value, named with what is accepted.
    """
    try:
        return LiveOptions.model_validate(options)
    except ValidationError as error:
        lines = [explain_error(item) for item in error.errors(include_url=False)]
        text = "; ".join(line.removeprefix("scenario: ") for line in lines)
        raise ValueError(f"live backend: {text}") from error
