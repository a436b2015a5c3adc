"""The `openai` client with bounds of its own; the only module that imports `openai`."""

from __future__ import annotations

import logging
from typing import Any

import openai

from vllm_tenant_tuning.agents.llm.config import NO_KEY, LLMConfig
from vllm_tenant_tuning.agents.llm.failures import Failure

KEY_REDACTED = "[api key]"


class _KeyFilter(logging.Filter):
    """Keeps keys out of the debug logs of the HTTP client, where endpoints may echo them."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        for key in self.keys:
            if key in message:
                record.msg = message = message.replace(key, KEY_REDACTED)
                record.args = ()
        return True


_KEY_FILTER = _KeyFilter()


class TooLargeError(Exception):
    """A response of more bytes than are accepted, or compressed against our word."""


class BoundedHTTPClient(openai.DefaultAsyncHttpxClient):
    """Reads at most `max_response_bytes` of a body, whatever its status.

    Follows no redirect and accepts no compression: few bytes could become many.
    """

    def __init__(self, max_response_bytes: int) -> None:
        super().__init__(follow_redirects=False)
        self._max_response_bytes = max_response_bytes

    async def send(self, request: Any, **options: Any) -> Any:
        """Send a request and read its response."""
        request.headers["Accept-Encoding"] = "identity"
        # the client adds these from the environment; this endpoint may be someone else's
        for name in ("OpenAI-Organization", "OpenAI-Project"):
            request.headers.pop(name, None)
        response = await super().send(request, **(options | {"stream": True}))
        try:
            if response.headers.get("Content-Encoding", "identity").lower() != "identity":
                raise TooLargeError("compressed")
            body = bytearray()
            async for chunk in response.aiter_raw():
                body += chunk
                if len(body) > self._max_response_bytes:
                    raise TooLargeError("too many bytes")
        finally:
            await response.aclose()
        headers = {"Content-Type": "text/plain; charset=utf-8"}  # the body is read as it is
        return type(response)(
            response.status_code, headers=headers, content=bytes(body), request=request
        )


def make_client(config: LLMConfig, key: str) -> openai.AsyncOpenAI:
    """A client that asks once and keeps the key out of its logs; deadlines are the caller's.

    Args:
        config: the endpoint and its limits.
        key: what is sent as the key.
    """
    if key != NO_KEY:
        _KEY_FILTER.keys.add(key)
        for name in list(logging.root.manager.loggerDict):  # filters are not inherited
            if name.startswith(("openai", "httpx", "httpcore")):
                logging.getLogger(name).addFilter(_KEY_FILTER)
    return openai.AsyncOpenAI(
        api_key=key,
        base_url=config.base_url,
        max_retries=0,
        timeout=None,
        http_client=BoundedHTTPClient(config.max_response_bytes),
    )


def classify(error: Exception) -> tuple[int | None, Failure | None, str]:
    """HTTP status, failure (None where the status says it) and body of a failed attempt.

    Messages of exceptions are not kept: they could quote the request.
    """
    if isinstance(error, openai.APIStatusError):
        return error.status_code, None, error.response.text
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TooLargeError):
            return None, Failure.TOO_LARGE, ""
        cause = cause.__cause__
    if isinstance(error, openai.APITimeoutError):
        return None, Failure.TIMEOUT, ""
    if isinstance(error, openai.APIConnectionError):
        return None, Failure.CONNECTION, ""
    return None, Failure.CLIENT, ""
