"""`worker-client conform`: holds a client to the specification, by a reducer that the kit plays."""

from __future__ import annotations

import subprocess
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from reducer.conformance import client_cases
from reducer.conformance.cases import tell
from worker_client import config

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reducer.conformance.client_cases import PlayedReducer

LAST_S = 1.0  # for what ended processes have said to arrive


def conform(
    command: Sequence[str], *, ranks: int, quiet: bool, say: Callable[[str], object]
) -> bool:
    """Try every case, and return whether all passed.

    Args:
        command: starts a rank of the client; if it is empty, the reader of the lines starts them.
        ranks: how many there are.
        quiet: whether what the command prints is dropped.
        say: called with each line.
    """

    def run(reducer: PlayedReducer) -> tuple[list[int], bool]:
        if command:
            return _started(reducer, command, ranks, quiet=quiet)
        names = f"REDUCTION_SERVERS={reducer.address} REDUCTION_JOB={reducer.job}"
        say(f"{reducer.scenario.goal}: start the ranks with WORLD_SIZE={ranks} {names}")
        return [], _awaited(reducer, ranks)

    return tell(client_cases.conform(run), say)


def _started(
    reducer: PlayedReducer, command: Sequence[str], ranks: int, *, quiet: bool
) -> tuple[list[int], bool]:
    """Run the client's processes with a reducer; return their statuses, and if some had to end."""
    told = {"WORLD_SIZE": str(ranks), "REDUCTION_SERVERS": reducer.address}
    told |= {"REDUCTION_JOB": reducer.job}
    output = subprocess.DEVNULL if quiet else None
    with ExitStack() as stack:
        processes = []
        for rank in range(ranks):
            variables = {**config.environment(), **told, "RANK": str(rank)}
            process = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        ended = _steps(reducer, lambda: all(one.poll() is not None for one in processes))
        _steps(reducer, lambda: _all_closed(reducer), LAST_S)
        return [one.returncode for one in processes if one.returncode is not None], not ended


def _awaited(reducer: PlayedReducer, ranks: int) -> bool:
    """Serve clients that somebody starts; return whether some had not left in time."""

    def left() -> bool:
        return len([link for link in reducer.links if link.hello]) >= ranks and _all_closed(reducer)

    return not _steps(reducer, left)


def _all_closed(reducer: PlayedReducer) -> bool:
    return all(link.peer.closed for link in reducer.links)


def _steps(
    reducer: PlayedReducer, ended: Callable[[], bool], seconds: float = client_cases.LIMIT_S
) -> bool:
    """Have a reducer serve until something is so; return whether it was in time."""
    end = time.monotonic() + seconds
    while not ended():
        if time.monotonic() > end:
            return False
        reducer.step()
    return True
