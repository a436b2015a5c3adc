"""Controlled batches on a running vLLM server, for `calibrate --url`.

Every trial is a line of JSON as it ends: each request with the time of every token, and how far
the server's own counters went. `calibrate_live` fits a profile to these lines, with or without
the server.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from vllm_tenant_tuning.backends.live.client import (
    Completion,
    CompletionClient,
    completion_body,
)
from vllm_tenant_tuning.backends.live.load import Prompts
from vllm_tenant_tuning.backends.live.metrics import MetricsError, Scrape, parse_metrics
from vllm_tenant_tuning.backends.live.options import LiveOptions
from vllm_tenant_tuning.backends.live.pages import (
    SCRAPE_TIMEOUT_S,
    NotReadyError,
    find_model,
)
from vllm_tenant_tuning.backends.live.records import RecordFile
from vllm_tenant_tuning.baselines.calibrate import CalibrationError

Kind = Literal["idle", "decode", "mixed", "burst", "pages"]

READY_TIMEOUT_S: Final = 10.0
TRIAL_TIMEOUT_S: Final = 300.0
COUNTERS_TIMEOUT_S: Final = 5.0
"""How long the server's counters may lag behind an answer that has come."""
COUNTERS_PERIOD_S: Final = 0.01

DECODE_STEPS: Final = 48
MOST_SEQUENCES: Final = 256
"""More sequences than this are not measured: the fit extends to them."""
PROMPT_SHARES: Final = (1 / 128, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 0.95)
"""Prompt lengths, as shares of the longest that one step takes."""
STEPS_BETWEEN: Final = 4
"""Decode steps between two prompts of a mixed trial."""
BURST: Final = 64
"""Requests at once that show the API server's CPU time for one; it is told in steps of 10 ms."""
PAGES: Final = 16
LIMITS: Final = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
"""The scheduler's, which the trials keep to and the profile says."""
COUNTED: Final = (
    "queue_time_s",
    "prefill_time_s",
    "prefill_time_requests",
    "ttft_s",
    "api_cpu_s",
)


@dataclass(frozen=True)
class Trial:
    """One controlled batch.

    Attributes:
        kind: "idle": one prompt alone, one token out. "decode": `sequences` requests at once,
            which then decode together. "mixed": prompts one after another, one token out each,
            beside `sequences` that decode. "burst": prompts at once, one token out each. "pages":
            nothing but reading `/metrics`, which costs the API server time as well.
        sequences: see there.
        context_tokens: prompt tokens of the sequences that decode.
        prompts: tokens of the prompts of "idle", "mixed" and "burst".
    """

    kind: Kind
    sequences: int
    context_tokens: int
    prompts: tuple[int, ...]


@dataclass(frozen=True)
class Limits:
    """What the trials must keep to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    kv_tokens: int


def plan(limits: Limits, shift: float = 0.0) -> list[Trial]:
    """The trials of one round, in order.

    Args:
        limits: what they must keep to.
        shift: from 0 up to 1, the round's: lengths and numbers of sequences between those of
            shift 0, so that rounds together show more than a machine's favourite sizes.

    Raises:
        CalibrationError: limits under which the coefficients cannot be told apart.
    """
    longest = min(limits.max_num_batched_tokens, limits.max_model_len - 1)
    shares = (share * 2**shift for share in PROMPT_SHARES)
    prompts = sorted({max(4, round(share * longest)) for share in shares if share <= 1})
    room = limits.max_model_len - 2 * DECODE_STEPS
    if len(prompts) < 4 or room < 64:
        raise CalibrationError(
            f"max_model_len, max_num_batched_tokens: got {limits.max_model_len} and "
            f"{limits.max_num_batched_tokens}; a calibration needs at least 256 of each"
        )
    most = min(limits.max_num_seqs, MOST_SEQUENCES)
    between = (round(2 ** (i + shift)) for i in range(1, most.bit_length()))
    counts = sorted({1, *(count for count in between if count < most), most})
    trials = [Trial("idle", 0, 0, (tokens,)) for tokens in prompts]
    short = max(16, round(0.03 * room))
    for count in counts:
        for context in (short, room // 2):
            # what does not fit the cache would be preempted
            fitting = min(context, limits.kv_tokens // count - 2 * DECODE_STEPS)
            if fitting >= short:
                trials.append(Trial("decode", count, fitting, ()))
    for count in sorted({1, counts[len(counts) // 2], max(1, most - 1)}):
        if count < most and count * (short + 2 * DECODE_STEPS) <= limits.kv_tokens:
            trials.append(Trial("mixed", count, short, tuple(prompts)))
    trials.append(Trial("burst", 0, 0, (prompts[0],) * BURST))
    trials.append(Trial("pages", 0, 0, ()))
    return trials


class Bench:
    """Runs trials on one server. Made and used in an event loop.

    Args:
        client: of the server.
        model: the served model's name.
        prompts: gives the token ids.
        records: takes a line for each trial.
    """

    def __init__(
        self, client: CompletionClient, model: str, prompts: Prompts, records: RecordFile
    ) -> None:
        self._client = client
        self._model = model
        self._prompts = prompts
        self._records = records
        self._requests = 0
        self._pages = 0

    async def run(self, trial: Trial, number: int) -> None:
        """Run a trial and record it.

        Raises:
            CalibrationError: a request did not complete; the trial is not recorded.
        """
        before = await self._counters()
        pages = self._pages
        start_s = time.monotonic()
        sent = await self.send(trial)
        ended = sum(completion.end == "completed" for _, _, completion in sent)
        after = await self._counters(before.get("prefill_time_requests", 0.0) + ended)
        self._records.append(
            {
                "record": "trial",
                "number": number,
                "kind": trial.kind,
                "sequences": trial.sequences,
                "context_tokens": trial.context_tokens,
                "pages": self._pages - pages,
                "requests": [
                    request_line(role, tokens, completion, start_s)
                    for role, tokens, completion in sent
                ],
                "counters": {
                    name: round(after[name] - before[name], 7)
                    for name in COUNTED
                    if name in before and name in after
                },
            }
        )

    async def send(self, trial: Trial) -> list[tuple[str, int, Completion]]:
        """The requests of a trial: role, prompt tokens, and what came of it.

        Raises:
            CalibrationError: a request did not complete.
        """
        match trial.kind:
            case "idle":
                return [await self._send(trial.prompts[0], 1, "probe")]
            case "decode":
                return await self._decode(trial)
            case "mixed":
                return await self._mixed(trial)
            case "burst":
                bodies = [self._body(tokens, 1) for tokens in trial.prompts]
                return await self._send_bodies(bodies, trial.prompts, "probe")
            case "pages":
                for _ in range(PAGES):
                    await self._counters()
                return []

    async def _mixed(self, trial: Trial) -> list[tuple[str, int, Completion]]:
        """Prompts one after another beside sequences that decode, which are cut off at the end."""
        output = 2 * DECODE_STEPS + STEPS_BETWEEN * len(trial.prompts)
        background = [
            (
                completion := Completion(),
                asyncio.ensure_future(
                    self._complete(trial.context_tokens, output, completion, "background")
                ),
            )
            for _ in range(trial.sequences)
        ]
        sent = []
        try:
            for tokens in trial.prompts:
                await _tokens_later(background, STEPS_BETWEEN)
                sent.append(await self._send(tokens, 1, "probe"))
            await _tokens_later(background, STEPS_BETWEEN)
        finally:
            for _, task in background:
                task.cancel()
            await asyncio.gather(*(task for _, task in background), return_exceptions=True)
        return [
            *(("background", trial.context_tokens, completion) for completion, _ in background),
            *sent,
        ]

    async def _decode(self, trial: Trial) -> list[tuple[str, int, Completion]]:
        # the first of long prompts decode while the last are computed
        output = DECODE_STEPS + trial.sequences
        bodies = [self._body(trial.context_tokens, output) for _ in range(trial.sequences)]
        tokens = [trial.context_tokens] * trial.sequences
        return await self._send_bodies(bodies, tokens, "background")

    async def _send_bodies(
        self, bodies: Sequence[bytes], tokens: Sequence[int], role: str
    ) -> list[tuple[str, int, Completion]]:
        completions = [Completion() for _ in bodies]
        await asyncio.gather(
            *(
                self._complete_body(body, completion, role)
                for body, completion in zip(bodies, completions, strict=True)
            )
        )
        return [(role, n, c) for n, c in zip(tokens, completions, strict=True)]

    async def _send(self, tokens: int, output: int, role: str) -> tuple[str, int, Completion]:
        completion = Completion()
        await self._complete(tokens, output, completion, role)
        return role, tokens, completion

    async def _complete(self, tokens: int, output: int, completion: Completion, role: str) -> None:
        await self._complete_body(self._body(tokens, output), completion, role)

    def _body(self, tokens: int, output: int) -> bytes:
        self._requests += 1
        return completion_body(self._model, self._prompts.tokens(self._requests, tokens), output)

    async def _complete_body(self, body: bytes, completion: Completion, role: str) -> None:
        try:
            await asyncio.wait_for(self._client.complete(body, completion), TRIAL_TIMEOUT_S)
        except TimeoutError as error:
            raise CalibrationError(
                f"a request ({role}) did not end within {TRIAL_TIMEOUT_S:g} s"
            ) from error
        if completion.end != "completed":
            raise CalibrationError(f"a request ({role}) {completion.end}: {completion.error}")

    async def _counters(self, prefilled: float = -math.inf) -> dict[str, float]:
        """The page's values, once so many prompts have been counted.

        Raises:
            CalibrationError: the page cannot be read, or the counters stand still.
        """
        until_s = time.monotonic() + COUNTERS_TIMEOUT_S
        while True:
            values = (await read_page(self._client)).values
            self._pages += 1
            if "prefill_time_s" not in values or values["prefill_time_requests"] >= prefilled:
                return values
            if time.monotonic() > until_s:
                raise CalibrationError(
                    "/metrics: vllm:request_prefill_time_seconds counts "
                    f"{values['prefill_time_requests']:g} requests, at least {prefilled:g} have "
                    "ended: another server's page, or one that is not updated"
                )
            await asyncio.sleep(COUNTERS_PERIOD_S)


async def measure(
    options: LiveOptions,
    given: dict[str, int],
    records_file: Path,
    rounds: int,
    on_plan: Callable[[Limits, int], None],
    on_trial: Callable[[int, int], None],
) -> None:
    """Run all trials and record them.

    Args:
        options: of the server.
        given: the scheduler's limits, `max_num_seqs`, `max_num_batched_tokens` and, where the
            server does not tell, `max_model_len`.
        records_file: takes a line for the server and one for each trial; must not exist.
        rounds: how often the trials are run.
        on_plan: called before the first trial, with the limits and the number of trials.
        on_trial: called after each, with how many were run and how many will be.

    Raises:
        CalibrationError: a server that cannot be calibrated, or a request that failed.
    """
    assert options.url is not None
    client = CompletionClient(
        options.url, options.api_key_env, options.connect_timeout_s, options.read_timeout_s
    )
    try:
        until_s = asyncio.get_running_loop().time() + READY_TIMEOUT_S
        try:
            model, max_model_len = await find_model(
                client, options.url, options, options.model, until_s
            )
        except NotReadyError as error:
            raise CalibrationError(str(error)) from error
        page = await read_page(client)
        if page.num_gpu_blocks is None or page.block_size is None:
            raise CalibrationError(
                "/metrics: no vllm:cache_config_info with num_gpu_blocks and block_size in it"
            )
        limits = _limits(given, max_model_len, page.num_gpu_blocks * page.block_size)
        trials = [plan(limits, round_ / rounds) for round_ in range(rounds)]
        on_plan(limits, sum(map(len, trials)))
        salt = options.salt if options.salt is not None else time.time_ns()
        records = RecordFile(records_file)
        try:
            records.append(
                {
                    "record": "server",
                    "url": options.url,
                    "model": model,
                    "num_gpu_blocks": page.num_gpu_blocks,
                    "block_size": page.block_size,
                    **{name: getattr(limits, name) for name in LIMITS},
                    "began": datetime.now(UTC).isoformat(timespec="seconds"),
                    "rounds": rounds,
                    "salt": salt,
                }
            )
            bench = Bench(client, model, Prompts(salt, *options.prompt_token_ids), records)
            await _run_all(bench, trials, on_trial)
        finally:
            records.close()
    finally:
        await client.close()


async def _run_all(
    bench: Bench, rounds: Sequence[Sequence[Trial]], on_trial: Callable[[int, int], None]
) -> None:
    for kind in ("idle", "decode", "mixed", "burst"):  # what is first of its kind is slow
        await bench.send(next(trial for trial in rounds[0] if trial.kind == kind))
    number, total = 0, sum(map(len, rounds))
    gc.collect()
    gc.freeze()
    rng = np.random.default_rng(0)
    for trials in rounds:
        for i in rng.permutation(len(trials)):  # a machine that slows down must not look like a law
            await bench.run(trials[int(i)], number)
            number += 1
            on_trial(number, total)


async def read_page(client: CompletionClient) -> Scrape:
    """The server's `/metrics`.

    Raises:
        CalibrationError: it cannot be read.
    """
    try:
        status, text = await client.get("/metrics", SCRAPE_TIMEOUT_S)
        if status != 200:
            raise CalibrationError(f"/metrics: HTTP {status}; a calibration needs this page")
        return parse_metrics(text)
    except (ConnectionError, MetricsError) as error:
        raise CalibrationError(str(error)) from error


def request_line(role: str, tokens: int, completion: Completion, start_s: float) -> dict[str, Any]:
    """The record of one request of a trial: seconds from the trial's start."""
    line: dict[str, Any] = {
        "role": role,
        "prompt_tokens": tokens,
        "end": completion.end,
        "sent_s": round(completion.sent_s - start_s, 6),
        "chunk_s": [round(at_s - start_s, 6) for at_s in completion.chunk_s],
    }
    if any(count != 1 for count in completion.chunk_tokens):
        line["chunk_tokens"] = completion.chunk_tokens.tolist()
    return line


def _limits(given: dict[str, int], max_model_len: int | None, kv_tokens: int) -> Limits:
    found = dict(given)
    if max_model_len is not None:
        found["max_model_len"] = max_model_len
    missing = [f"--{name.replace('_', '-')}" for name in LIMITS if name not in found]
    if missing:
        raise CalibrationError(
            f"{', '.join(missing)}: the server does not tell; give it, or a --template"
        )
    return Limits(**found, kv_tokens=kv_tokens)


async def _tokens_later(
    background: Sequence[tuple[Completion, asyncio.Future[None]]], tokens: int
) -> None:
    """Wait until every sequence has generated so many tokens more."""
    goals = [completion.tokens + tokens for completion, _ in background]
    until_s = time.monotonic() + TRIAL_TIMEOUT_S
    for (completion, task), goal in zip(background, goals, strict=True):
        while completion.tokens < goal:
            if task.done():
                await task  # raises what it failed with
                raise CalibrationError("a sequence ended before the prompts beside it were sent")
            if time.monotonic() > until_s:
                raise CalibrationError(f"no {tokens} tokens came within {TRIAL_TIMEOUT_S:g} s")
            await asyncio.sleep(0.002)
