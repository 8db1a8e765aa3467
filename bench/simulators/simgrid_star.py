"""One all-reduce through reducers in SimGrid: hosts around one switch, whose links share fairly.

`bench.opinions` starts it with the system's Python, for which SimGrid has a package. Standard input
has one JSON object, what a scenario and the project's rules give; standard output gets another one.
A host sends messages in order, some of them at once, and SimGrid says how fast they are: the
rate of a message is what the two links leave it. The delay between hosts is waited for apart, as a
sender that waits for it with each message would leave its link idle. Processors cost nothing.
"""

import heapq
import itertools
import json
import sys
from collections.abc import Callable
from typing import NamedTuple

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, NetZone, Semaphore, this_actor


class Job(NamedTuple):
    """What is simulated.

    Attributes:
        embedded: whether worker i hosts reducer i; their messages to each other take no time.
        shard_bytes: of a buffer, at each reducer.
        window_bytes: that a worker may have in flight at a reducer.
        framing_bytes: of a message, besides its chunk.
        worker_rate, reducer_rate: of links each way, bytes per second.
        delay_s: from a host to another one.
        worker_lanes, reducer_lanes: messages that a host sends at once, to different hosts.
    """

    workers: int
    reducers: int
    embedded: bool
    shard_bytes: int
    chunk_bytes: int
    window_bytes: int
    framing_bytes: int
    worker_rate: float
    reducer_rate: float
    delay_s: float
    worker_lanes: int
    reducer_lanes: int


class Sender:
    """Sends a host's messages, each as soon as its time has come and a lane is free."""

    def __init__(self, host: Host, lanes: int) -> None:
        self.host = host
        self._due: list[tuple[float, int, Host, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._wake = Semaphore(0)
        self._waiting = 0
        for lane in range(lanes):
            Actor.create(f"lane-{lane}", host, self._run).daemonize()

    def post(self, when: float, to: Host, nbytes: int, arrived: Callable[[], None]) -> None:
        """Send a message when its time has come; `arrived` is called when it has left."""
        heapq.heappush(self._due, (when, next(self._numbers), to, nbytes, arrived))
        if self._waiting:
            self._waiting -= 1
            self._wake.release()

    def _run(self) -> None:
        while True:
            if not self._due:
                self._waiting += 1
                self._wake.acquire()
            elif self._due[0][0] > Engine.clock:
                this_actor.sleep_until(self._due[0][0])
            else:
                _, _, to, nbytes, arrived = heapq.heappop(self._due)
                if to.name != self.host.name:
                    Comm.sendto(self.host, to, nbytes)
                arrived()


class AllReduce:
    """The rules of docs/protocol.md: who sends which chunk, and when.

    Attributes:
        end_s: when the last result has come; 0 until then.
    """

    def __init__(self, job: Job, workers: list[Host], reducers: list[Host]) -> None:
        self._job = job
        self._chunks = -(-job.shard_bytes // job.chunk_bytes)
        self._workers = [Sender(host, job.worker_lanes) for host in workers]
        self._reducers = [Sender(host, job.reducer_lanes) for host in reducers]
        self._missing = [[job.workers] * self._chunks for _ in reducers]
        self._results = job.workers * job.reducers * self._chunks
        self._done = Semaphore(0)
        self.end_s = 0.0

    def run(self) -> None:
        """Begin with what the windows allow, and wait for the end."""
        first = min(self._chunks, max(1, self._job.window_bytes // self._job.chunk_bytes))
        for chunk, step, worker in itertools.product(
            range(first), range(self._job.reducers), range(self._job.workers)
        ):
            self._contribute(worker, (worker + step) % self._job.reducers, chunk, 0.0)
        self._done.acquire()

    def _contribute(self, worker: int, reducer: int, chunk: int, when: float) -> None:
        def arrived() -> None:
            self._missing[reducer][chunk] -= 1
            if not self._missing[reducer][chunk]:
                for step in range(self._job.workers):
                    to = (chunk + reducer + step) % self._job.workers
                    self._answer(to, reducer, chunk, Engine.clock + self._job.delay_s)

        to = self._reducers[reducer].host
        self._workers[worker].post(when, to, self._nbytes(chunk), arrived)

    def _answer(self, worker: int, reducer: int, chunk: int, when: float) -> None:
        def arrived() -> None:
            now = Engine.clock + self._job.delay_s
            following = chunk + max(1, self._job.window_bytes // self._job.chunk_bytes)
            if following < self._chunks:
                self._contribute(worker, reducer, following, now)
            self._results -= 1
            if not self._results:
                self.end_s = now
                self._done.release()

        to = self._workers[worker].host
        self._reducers[reducer].post(when, to, self._nbytes(chunk), arrived)

    def _nbytes(self, chunk: int) -> int:
        start = chunk * self._job.chunk_bytes
        return min(self._job.chunk_bytes, self._job.shard_bytes - start) + self._job.framing_bytes


def hosts_of(job: Job) -> tuple[list[Host], list[Host]]:
    """Make the platform; return the workers and the reducers."""
    star = NetZone.create_star_zone("star")
    hosts = []
    for number in range(job.workers + (0 if job.embedded else job.reducers)):
        rate = job.worker_rate if number < job.workers else job.reducer_rate
        host = star.create_host(f"host-{number}", 1e9).seal()
        link = star.create_split_duplex_link(f"link-{number}", rate).set_latency(0).seal()
        up = [LinkInRoute(link, LinkInRoute.UP)]
        star.add_route(host.netpoint, None, None, None, up, True)
        hosts.append(host)
    star.seal()
    return hosts[: job.workers], hosts[: job.reducers] if job.embedded else hosts[job.workers :]


def main() -> None:
    job = Job(**json.load(sys.stdin))
    # Rates as they are: no allowance for TCP's headers and slow start, which SimGrid has fitted.
    engine = Engine(
        [
            "simgrid_star",
            "--log=root.thresh:warning",
            *("--cfg=network/model:CM02", "--cfg=network/TCP-gamma:0"),
        ]
    )
    workers, reducers = hosts_of(job)
    all_reduce = AllReduce(job, workers, reducers)
    Actor.create("all-reduce", workers[0], all_reduce.run)
    engine.run()
    json.dump({"seconds": all_reduce.end_s}, sys.stdout)


if __name__ == "__main__":
    main()
