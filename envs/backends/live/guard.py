"""Runs a server in a process group of its own and ends it when its parent is gone.

    python guard.py COMMAND...

The parent holds the other end of standard input: when that closes, because the parent closed it,
crashed or was killed, the whole group is ended. Standard library only, so that it starts at once.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time

TERM_TIMEOUT_S = 15.0
POLL_S = 0.1


def end_group(server: subprocess.Popen[bytes]) -> None:
    """End the server and all its children: politely, then not."""
    for sign, timeout_s in ((signal.SIGTERM, TERM_TIMEOUT_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(server.pid, sign)
            if sign is signal.SIGTERM:
                os.killpg(server.pid, signal.SIGCONT)  # a stopped one cannot end politely
        except ProcessLookupError:
            break
        until_s = time.monotonic() + timeout_s
        while time.monotonic() < until_s:
            server.poll()
            try:
                os.killpg(server.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(POLL_S)


def main() -> int:
    """Run the command; returns its exit status, as a shell would give it."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)  # the parent decides, by closing the pipe

    def reset_signals() -> None:
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sign, signal.SIG_DFL)

    server = subprocess.Popen(
        sys.argv[1:],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=reset_signals,
    )
    while server.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            break
    end_group(server)  # a dead server may have left children
    status = server.wait()
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    raise SystemExit(main())
