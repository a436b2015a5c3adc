"""One attempt at an OpenAI-compatible endpoint, bounded in time and size whatever it does."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

from vllm_tenant_tuning.agents.llm.answer import TOOL_NAME
from vllm_tenant_tuning.agents.llm.config import NO_KEY, LLMConfig, OutputForm
from vllm_tenant_tuning.agents.llm.failures import Failure
from vllm_tenant_tuning.agents.llm.transcript import Attempt

CONNECTIONS_MARGIN_S = 5.0
"""How much longer than its limit an attempt is waited for, should its thread be held up."""


class Endpoint:
    """The client of one agent, with an event loop in a thread of its own.

    The thread lets a deadline end an attempt wherever it hangs (name resolution, a drip of
    single bytes), and lets callers have an event loop of their own, as notebooks do.

    Args:
        config: the endpoint, its key's variable and the limits.

    Raises:
        ImportError: the extra `agents` is not installed.
        ValueError: a key that is missing.
    """

    def __init__(self, config: LLMConfig) -> None:
        try:
            from vllm_tenant_tuning.agents.llm import client
        except ImportError as error:
            raise ImportError(
                f"an LLM agent needs the extra 'agents' ({error}): "
                "pip install 'vllm-tenant-tuning[agents]'"
            ) from error
        self._key = config.api_key()
        self._config = config
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=_run, args=(self._loop,), name="llm-endpoint", daemon=True)
        thread.start()
        self._client = client.make_client(config, self._key or NO_KEY)
        self._classify = client.classify
        self._redacted = client.KEY_REDACTED
        self._finalizer = weakref.finalize(self, _stop, self._loop, thread, self._client)

    def close(self) -> None:
        """Close the connections and end the thread."""
        self._finalizer()

    def ask(
        self,
        messages: Sequence[dict[str, str]],
        form: OutputForm,
        schema: dict[str, Any],
        timeout_s: float,
        seed: int,
    ) -> Attempt:
        """Send one request; whatever happens is in the attempt, nothing is raised.

        Args:
            messages: of the prompt.
            form: how to ask for structured output.
            schema: of the answer.
            timeout_s: for the whole attempt.
            seed: for the model's sampling.
        """
        request = {
            "model": self._config.model,
            "messages": list(messages),
            self._config.token_limit_parameter: self._config.max_tokens,
            "seed": seed,
            **_output_form(form, schema),
        }
        if self._config.temperature is not None:
            request["temperature"] = self._config.temperature
        if self._config.extra_body:
            request["extra_body"] = self._config.extra_body
        began = time.perf_counter()
        future = asyncio.run_coroutine_threadsafe(self._send(request, timeout_s), self._loop)
        status, failure, body = None, None, ""
        try:
            status, body = future.result(timeout_s + CONNECTIONS_MARGIN_S)
        except TimeoutError:
            future.cancel()
            failure = Failure.TIMEOUT
        except Exception as error:  # whatever a hostile endpoint makes the client raise
            status, failure, body = self._classify(error)
        latency_s = min(time.perf_counter() - began, timeout_s)
        if self._key is not None:  # an endpoint may send it back
            body = body.replace(self._key, self._redacted)
        return Attempt(form=form, status=status, failure=failure, body=body, latency_s=latency_s)

    async def _send(self, request: dict[str, Any], timeout_s: float) -> tuple[int, str]:
        async with asyncio.timeout(timeout_s):
            response = await self._client.chat.completions.with_raw_response.create(**request)
            return response.status_code, response.http_response.text


def _output_form(form: OutputForm, schema: dict[str, Any]) -> dict[str, Any]:
    if form == "json_schema":
        content = {"name": TOOL_NAME, "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": content}}
    if form == "tool":
        function = {
            "name": TOOL_NAME,
            "description": "Change the tenants' caps.",
            "parameters": schema,
        }
        return {
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": TOOL_NAME}},
        }
    return {}


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: Any) -> None:
    async def end() -> None:
        await client.close()
        loop.stop()

    loop.call_soon_threadsafe(loop.create_task, end())
    thread.join(CONNECTIONS_MARGIN_S)
