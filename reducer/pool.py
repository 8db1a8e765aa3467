"""`local_pool`: real reducer processes on this machine, for tests, notebooks and the demo."""

from __future__ import annotations

import selectors
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING

from reducer.errors import ConfigError, ReducerLostError

if TYPE_CHECKING:
    from collections.abc import Iterator

READY = "reducer ready on "  # the line by which a started reducer tells its address
START_S = 30.0
STOP_S = 5.0


@contextmanager
def local_pool(
    reducers: int = 2, *, kernel: str | None = None, memory_limit: str | None = None
) -> Iterator[list[str]]:
    """Start a pool of reducer processes on loopback and stop it at the end of the block.

    Args:
        reducers: how many, at least 1.
        kernel: kernel variant, the CPU's best by default.
        memory_limit: of each reducer, such as ``"1GiB"``.

    Yields:
        Their addresses, ``["127.0.0.1:PORT", ...]``, as `worker_client.init(servers=...)` takes
        them.

    Raises:
        ConfigError: `reducers` is less than 1.
        ReducerLostError: a reducer did not start; the message holds what it printed.

    The processes also end when this one dies, however it dies.
    """
    if reducers < 1:
        raise ConfigError(f"a pool needs at least 1 reducer, got {reducers}")
    command = [sys.executable, "-m", "reducer", "serve", "--bind", "tcp://127.0.0.1:0"]
    # One port that the environment names could not serve several reducers.
    command += ["--stop-at-eof", "--log-level", "warning", "--http", "off"]
    command += ["--kernel", kernel] if kernel else []
    command += ["--memory-limit", memory_limit] if memory_limit else []
    with ExitStack() as stack:
        processes = [stack.enter_context(_process(command)) for _ in range(reducers)]
        yield [_address(process) for process in processes]


@contextmanager
def _process(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    # The child stops when its standard input ends: this process need only close it, or die.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, text=True
    )
    try:
        yield process
    finally:
        _pipe(process.stdin).close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _pipe(process.stdout).close()


def _address(process: subprocess.Popen[str]) -> str:
    output = _pipe(process.stdout)
    deadline = time.monotonic() + START_S
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            line = output.readline()
            if line.startswith(READY):
                return line.removeprefix(READY).strip()
            if not line:
                break
    raise ReducerLostError(
        f"a reducer did not start within {START_S:g} s (exit code {process.poll()}): "
        "what it said is on standard error",
        reducer="127.0.0.1",
    )


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream
