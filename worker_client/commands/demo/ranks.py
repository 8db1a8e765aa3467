"""The demo's worker processes: start them, read what they report, leave none behind."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any, AnyStr

from reducer.errors import ReductionError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


def run(
    workers: int, servers: list[str], spec: dict[str, Any]
) -> Generator[dict[str, Any], None, None]:
    """Run `worker_client.commands.demo.train` at every rank and yield what the ranks report.

    Raises:
        ReductionError: a rank failed; the message holds the end of what it said.

    No process is left when the generator ends or is closed; should this process be killed, the
    ranks end with their standard input.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("REDUCTION_")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": "1",
        "REDUCTION_SERVERS": ",".join(servers),
    }
    command = [sys.executable, "-m", "worker_client.commands.demo.train", json.dumps(spec)]
    with ExitStack() as stack:
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, ranks)
        said = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(workers)]
        for rank in range(workers):
            process = subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said[rank],
            )
            ranks.append(process)
        for rank, line in _lines(ranks):
            if line is None:
                raise ReductionError(_obituary(rank, ranks[rank].returncode, said[rank]))
            yield json.loads(line)


def _lines(ranks: list[subprocess.Popen[bytes]]) -> Iterator[tuple[int, bytes | None]]:
    """Yield lines of all ranks as they come, and None for a rank that ended with an error."""
    begun = [b""] * len(ranks)  # what came of a rank's next line
    with selectors.DefaultSelector() as selector:
        for rank, process in enumerate(ranks):
            selector.register(pipe(process.stdout), selectors.EVENT_READ, rank)
        while selector.get_map():
            for key, _ in selector.select():
                rank = key.data
                came = os.read(key.fd, 1 << 16)
                *lines, begun[rank] = (begun[rank] + came).split(b"\n")
                for line in lines:
                    yield rank, line
                if not came:
                    selector.unregister(key.fileobj)
                    if ranks[rank].wait() != 0:
                        yield rank, None


def _obituary(rank: int, code: int, said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return "\n".join([f"worker {rank} {how}, and the others were stopped", *lines[-5:]])


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait()
        pipe(process.stdin).close()
        pipe(process.stdout).close()


def pipe(stream: IO[AnyStr] | None) -> IO[AnyStr]:
    """Return a process's stream that was asked for."""
    assert stream is not None
    return stream


def free_port() -> int:
    """Return a port that nobody listens at, on any address of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
