"""What a server says of itself: the model that it serves, its version, its metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json

from vllm_tenant_tuning.backends.live.client import CompletionClient
from vllm_tenant_tuning.backends.live.metrics import MetricsError, ServerMetrics, parse_metrics
from vllm_tenant_tuning.backends.live.options import LiveOptions

SCRAPE_TIMEOUT_S = 2.0
PROBE_PERIOD_S = 0.25


class NotReadyError(Exception):
    """A server on which no episode can begin."""


async def find_model(
    client: CompletionClient, url: str, options: LiveOptions, wanted: str | None, until_s: float
) -> tuple[str, int | None]:
    """The served model's name and its longest context, once the server answers.

    Args:
        client: reads the server's pages.
        url: of the server, for messages.
        options: with the name of the API key's variable.
        wanted: the model's name; None for the first that the server lists.
        until_s: when to give up, by the event loop's clock.

    Raises:
        NotReadyError: no answer, no such model, or an API key that is wanted.
    """
    loop = asyncio.get_running_loop()
    problem = ""
    while True:
        try:
            status, text = await client.get("/v1/models", SCRAPE_TIMEOUT_S)
            if status in (401, 403):
                raise NotReadyError(
                    f"{url} wants an API key (HTTP {status}); it is taken from the "
                    f"environment variable {options.api_key_env}"
                )
            if status == 200:
                break
            problem = f"/v1/models: HTTP {status}"
        except ConnectionError as error:
            problem = str(error)
        if loop.time() > until_s:
            raise NotReadyError(f"{url} is not ready: {problem}")
        await asyncio.sleep(PROBE_PERIOD_S)
    try:
        served = {card["id"]: card.get("max_model_len") for card in json.loads(text)["data"]}
    except (ValueError, KeyError, TypeError) as error:
        raise NotReadyError(f"{url}/v1/models: not a list of models") from error
    name = wanted or next(iter(served), "")
    if name not in served:
        raise NotReadyError(f"model: got {name!r}; {url} serves {', '.join(served) or 'none'}")
    return name, served[name]


async def scrape(client: CompletionClient, metrics: ServerMetrics) -> bool:
    """Read `/metrics` once; returns whether the server answered at all."""
    loop = asyncio.get_running_loop()
    try:
        status, page = await client.get("/metrics", SCRAPE_TIMEOUT_S)
        if status != 200:
            raise MetricsError(f"/metrics: HTTP {status}")
        metrics.add(parse_metrics(page), loop.time())
    except MetricsError as error:
        metrics.fail(str(error))
    except ConnectionError as error:
        metrics.fail(str(error))
        return False
    return True


async def version(client: CompletionClient) -> str | None:
    """The server's version by its own account; None where it has none to tell."""
    with contextlib.suppress(ConnectionError, ValueError, KeyError, TypeError):
        status, text = await client.get("/version", SCRAPE_TIMEOUT_S)
        if status == 200:
            return str(json.loads(text)["version"])
    return None
