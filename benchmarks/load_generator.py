"""How many streamed tokens a second one core of the live backend's load generator takes.

    python benchmarks/load_generator.py [--streams 64,128,256,512] [--seconds 8]

A stub server on one core writes vLLM's own chunks, one token each, at an even pace to every
stream; the load generator (gate, client, telemetry and records, all on another core) keeps the
streams full. The rate rises until the generator's core is busy: beyond it, tokens are read in
lumps and late. Prints a line of JSON for every number of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np

from vllm_tenant_tuning import load_scenario
from vllm_tenant_tuning.backends.live.client import CompletionClient
from vllm_tenant_tuning.backends.live.load import Load, Prompts
from vllm_tenant_tuning.backends.live.records import RecordFile
from vllm_tenant_tuning.workload import RequestStream

TOKENS = 256
TOKEN_S = 0.010
PROMPT_TOKENS = 512


def frame(tokens: int) -> bytes:
    """An event as vLLM 0.32 sends it, as one HTTP chunk."""
    event = (
        b'data: {"id":"cmpl-9feaffcc9ddec88a","object":"text_completion","created":1796250778,'
        b'"model":"tiny","choices":[{"index":0,"text":" the","logprobs":null,"finish_reason":null,'
        b'"stop_reason":null,"prompt_token_ids":null,"token_ids":null}],"usage":{"prompt_tokens":'
        b'%d,"total_tokens":%d,"completion_tokens":%d}}\n\n'
    ) % (PROMPT_TOKENS, PROMPT_TOKENS + tokens, tokens)
    return b"%x\r\n%s\r\n" % (len(event), event)


FRAMES = [frame(n + 1) for n in range(TOKENS)]
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d}}\n\n' % (
    PROMPT_TOKENS,
    TOKENS,
)
END = b"%x\r\n%s\r\n" % (len(LAST), LAST) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


SLOTS = 10


class Stub(asyncio.Protocol):
    """Answers every request with TOKENS events, TOKEN_S apart.

    Streams share SLOTS timers: one for each would cost more than sending.
    """

    slots: ClassVar[list[list[Stub]]] = [[] for _ in range(SLOTS)]
    next_slot: ClassVar[Iterator[int]] = itertools.cycle(range(SLOTS))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._received = b""
        self._sent = 0

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        if separator and length and len(body) >= int(length[1]):
            self._received = b""
            self._sent = 0
            self._transport.write(HEAD)
            self.slots[next(self.next_slot)].append(self)

    def send(self) -> bool:
        """Send the next event; returns whether more follow."""
        if self._transport.is_closing():
            return False
        if self._sent == TOKENS:
            self._transport.write(END)
            return False
        self._transport.write(FRAMES[self._sent])
        self._sent += 1
        return True

    @classmethod
    async def tick(cls) -> None:
        """Serve one slot after the other, each once in TOKEN_S."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for slot in itertools.cycle(range(SLOTS)):
            due_s += TOKEN_S / SLOTS
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            cls.slots[slot] = [stream for stream in cls.slots[slot] if stream.send()]


async def serve() -> None:
    """Run the stub and print its port."""
    server = await asyncio.get_running_loop().create_server(Stub, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await Stub.tick()


async def measure(port: int, streams: int, seconds: float) -> dict[str, float]:
    """Keep `streams` streams full for `seconds`; rates and lateness of the middle part."""
    scenario = load_scenario("cpu_chat_batch")
    scenario = scenario.model_copy(update={"tenants": scenario.tenants[:1]})
    n = int(streams * (seconds / (TOKENS * TOKEN_S) + 2))
    # the first streams begin spread over one stream's time, the others wait at the gate
    arrival_s = np.minimum(np.arange(n) / streams, 1.0) * TOKENS * TOKEN_S
    stream = RequestStream(
        offsets=np.array([0, n]),
        arrival_s=arrival_s,
        prompt_tokens=np.full(n, PROMPT_TOKENS),
        output_tokens=np.full(n, TOKENS),
        service_s=np.full(n, np.nan),
    )
    loop = asyncio.get_running_loop()
    client = CompletionClient(f"http://127.0.0.1:{port}", "VLLM_API_KEY", 5.0, 60.0)
    with tempfile.TemporaryDirectory() as folder:
        records = RecordFile(Path(folder) / "requests.jsonl")
        load = Load(scenario, stream, [streams], client, "stub", Prompts(0, 100, 356), records)
        load.begin(loop.time())
        await asyncio.sleep(TOKENS * TOKEN_S + 1.0)
        load.report(loop.time())
        began_s, cpu_s, tokens = loop.time(), time.process_time(), load.generated_tokens
        while loop.time() < began_s + seconds:
            await asyncio.sleep(2.0)
            seen = load.observe(loop.time())[0]
        elapsed_s = loop.time() - began_s
        cpu = (time.process_time() - cpu_s) / elapsed_s
        tokens = load.generated_tokens - tokens
        report = load.report(loop.time())
        await load.stop()
        records.close()
    await client.close()
    return {
        "streams": streams,
        "offered_tokens_per_s": round(streams / TOKEN_S),
        "tokens_per_s": round(tokens / elapsed_s),
        "core_busy": round(cpu, 3),
        "itl_p50_ms": round(1e3 * float(seen["itl_p50_s"]), 2),
        "itl_p99_ms": round(1e3 * float(seen["itl_p99_s"]), 2),
        "event_loop_lag_p99_ms": round(1e3 * report["event_loop_lag_p99_s"], 2),
        "send_lateness_p99_ms": round(1e3 * report["send_lateness_p99_s"], 2),
    }


def main() -> None:
    """Start the stub on the first core and measure on the last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", default="64,128,192,256,320")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if arguments.stub:
        os.sched_setaffinity(0, {cores[0]})
        asyncio.run(serve())
        return
    for streams in map(int, arguments.streams.split(",")):
        with subprocess.Popen(
            [sys.executable, __file__, "--stub"], stdout=subprocess.PIPE, text=True
        ) as stub:
            assert stub.stdout is not None
            port = int(stub.stdout.readline())
            os.sched_setaffinity(0, {cores[-1]})
            print(json.dumps(asyncio.run(measure(port, streams, arguments.seconds))), flush=True)
            os.sched_setaffinity(0, cores)
            stub.terminate()


if __name__ == "__main__":
    main()
