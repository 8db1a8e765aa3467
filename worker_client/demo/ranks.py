"""The demo's worker processes: start them, read what they report, leave none behind."""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING, Any

from reducer.errors import ReductionError

if TYPE_CHECKING:
    from collections.abc import Iterator


def run(workers: int, servers: list[str], spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run `worker_client.demo.train` at every rank and yield what the ranks report.

    Args:
        workers: number of ranks.
        servers: addresses of the reducers, none for embedded ones.
        spec: arguments of `train`.

    Raises:
        ReductionError: a rank failed; the message holds the end of what it said.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("REDUCTION_")},
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(workers),
        "OMP_NUM_THREADS": "1",
        "REDUCTION_SERVERS": ",".join(servers),
    }
    command = [sys.executable, "-m", "worker_client.demo.train", json.dumps(spec)]
    with ExitStack() as stack:
        said = stack.enter_context(tempfile.TemporaryFile())
        ranks: list[subprocess.Popen[str]] = []
        stack.callback(_end, ranks)
        ranks.extend(
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )
            for rank in range(workers)
        )
        for line in _lines(ranks):
            yield json.loads(line)
        _check(ranks, said)


def _lines(ranks: list[subprocess.Popen[str]]) -> Iterator[str]:
    """Yield lines of all ranks as they come, until all have ended or one has failed."""
    with selectors.DefaultSelector() as selector:
        for process in ranks:
            selector.register(_output(process), selectors.EVENT_READ, process)
        while selector.get_map():
            for key, _ in selector.select():
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if line:
                    yield line
                    continue
                selector.unregister(key.fileobj)
                if key.data.wait() != 0:
                    return


def _check(ranks: list[subprocess.Popen[str]], said: IO[bytes]) -> None:
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    if failed:
        said.seek(0)
        end = said.read().decode(errors="replace").strip()[-2000:]
        raise ReductionError(
            f"worker {failed[0]} ended with exit code {ranks[failed[0]].returncode}:\n{end}"
        )


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait()
        _output(process).close()


def _output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
