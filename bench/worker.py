"""One rank of one contender: does what its parent says, and times it.

``python -m bench.worker CONTROL NAME KIND PLACE`` connects to the parent's Unix socket (which works
across network namespaces, and leaves the links that are measured alone). Commands and replies are
lines of JSON. Between commands the process sleeps in `readline`.
"""

import faulthandler
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.contenders import OURS, AllReduce, Embedded, Gloo, Kind, Mpi, Place, Pool
from harness import oracle


class Worker:
    """Carries out commands; each method of a command's name returns its reply."""

    def __init__(self, contender: AllReduce, place: Place, *, exact: bool) -> None:
        self._contender = contender
        self._place = place
        self._exact = exact
        self._array: oracle.Array | None = None
        self._call: Callable[[], object] = lambda: None

    def offer(self) -> dict[str, Any]:
        """Open what others connect to."""
        return {"offer": self._contender.offer()}

    def join(self, offers: list[str]) -> dict[str, Any]:
        """Connect to the others."""
        self._contender.join(offers)
        return {}

    def prepare(
        self, count: int, check: bool, groups: list[list[int]] | None = None
    ) -> dict[str, Any]:
        """Make a buffer of `count` elements, or the groups of a step, and all-reduce once.

        Returns:
            As `run`. The time of this first run is a hint for how many make a good block; memory
            and connections are cold.
        """
        rank = self._place.rank
        arrays = [[oracle.contribution(rank, n) for n in group] for group in groups or [[count]]]
        calls = [self._contender.bind(*group) for group in arrays]
        self._array = arrays[0][0]
        self._call = calls[0] if len(calls) == 1 else lambda: [call() for call in calls]
        reply = self.run(1)
        if check:
            reply["wrong"] = sum(self._wrong(array) for group in arrays for array in group)
        return reply

    def _wrong(self, array: oracle.Array) -> int:
        wire = self._place.wire_dtype
        if wire and array.nbytes < _smallest_cast():
            wire = ""
        return oracle.wrong(array, self._place.world_size, exact=self._exact, wire_dtype=wire)

    def run(self, iterations: int) -> dict[str, Any]:
        """All-reduce the buffer `iterations` times; note when it began, and when each has ended.

        The sums grow to infinity if there are many; that costs no time.
        """
        call, clock = self._call, time.monotonic  # one clock for all processes of the machine
        ends = [0.0] * iterations
        cpu, begun = _cpu_seconds(), clock()
        for iteration in range(iterations):
            call()
            ends[iteration] = clock()
        return {"begun": begun, "ends": ends, "cpu_seconds": _cpu_seconds() - cpu}

    def mix(self, count: int, first: int, largest: int, check_every: int) -> dict[str, Any]:
        """All-reduce `count` times, 1 to `largest` elements, log-uniform; `first` were before.

        Each starts from this rank's contribution; of each `check_every`-th, all elements are
        compared. All sizes share one buffer, which stays.
        """
        if self._array is None:
            self._array = oracle.contribution(self._place.rank, largest)
        # A contribution repeats from its start only: a part of it is a smaller one.
        original = oracle.contribution(self._place.rank, largest)
        exponents = np.random.default_rng(first).uniform(0, np.log(largest), count)
        reply = {"nbytes": 0, "wrong": 0, "checked": 0}
        for number, elements in enumerate(np.exp(exponents).astype(int).tolist(), first + 1):
            part = self._array[:elements]
            np.copyto(part, original[:elements])
            self._contender.bind(part)()
            reply["nbytes"] += part.nbytes
            if number % check_every == 0:
                size = self._place.world_size
                reply["wrong"] += oracle.wrong(part, size, exact=self._exact)
                reply["checked"] += elements
        return reply

    def release(self) -> dict[str, Any]:
        """Give the buffer back."""
        self._array, self._call = None, lambda: None
        return {}

    def close(self) -> dict[str, Any]:
        """Leave the others."""
        self._contender.close()
        return {}


def create(kind: Kind, place: Place) -> AllReduce:
    """Make this process's part of a contender.

    Raises:
        ImportError: what the contender needs is not installed.
    """
    if kind == "ring":
        from bench.ring import Ring  # noqa: PLC0415 (baselines do not load our kernels)

        return Ring(place)
    classes: dict[Kind, Callable[[Place], AllReduce]] = {
        "pool": Pool,
        "mixed": Embedded,
        "embedded": Embedded,
        "gloo": Gloo,
        "mpi": Mpi,
    }
    return classes[kind](place)


def _smallest_cast() -> int:
    from worker_client.staging.wire_rule import SMALLEST_BYTES  # noqa: PLC0415 (baselines do not load it)

    return SMALLEST_BYTES


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)  # all threads, in user space and the kernel
    return used.ru_utime + used.ru_stime


def main(control: str, name: str, kind: Any, place_text: str) -> None:
    """Serve the parent until it says ``close`` or is gone."""
    faulthandler.enable()  # the parent aborts a process that stalls, to learn where
    place = Place(**json.loads(place_text))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(control)
        with connection.makefile("rw") as stream:
            # Commands that were sent meanwhile wait in the socket.
            contender = create(kind, place)
            if isinstance(contender, Mpi):
                place = Place(contender.rank, place.world_size, place.address, place.leader)
            exact = kind in OURS
            worker = Worker(contender, place, exact=exact)
            _say(stream, {"name": name, "rank": place.rank, "pid": os.getpid()})
            for line in stream:
                command = json.loads(line)
                action = command.pop("do")
                try:
                    reply = getattr(worker, action)(**command)
                except Exception as error:  # noqa: BLE001 (the parent prints it, whatever it is)
                    reply = {"error": f"{type(error).__name__}: {error}"}
                _say(stream, reply)
                if action == "close":
                    return


def _say(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
