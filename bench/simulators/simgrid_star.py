"""One all-reduce through reducers in SimGrid: hosts around one switch, whose links share fairly.

`bench.opinions` starts it with the system's Python, for which SimGrid has a package. Standard input
has one JSON object, what a scenario and the project's rules give; standard output gets another one.
A connection sends its messages in order, and all connections send at once. SimGrid says how fast
they are: the rate of a message is what the two links leave it. The delay between hosts is waited
for apart, as a sender that waits for it with each message would leave its link idle. Processors
cost nothing.
"""

import itertools
import json
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from simgrid import Actor, Comm, Engine, Host, LinkInRoute, Mailbox, NetZone, Semaphore


class Job(NamedTuple):
    """What is simulated.

    Attributes:
        embedded: whether worker i hosts reducer i; their messages to each other take no time.
        shard_bytes: of a buffer, at each reducer.
        window_bytes: that a worker may have in flight at a reducer.
        framing_bytes: of a message, besides its chunk.
        worker_rate, reducer_rate: of links each way, bytes per second.
        delay_s: from a host to another one.
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


CONNECTIONS = 16  # of one actor: to wait for any of many takes SimGrid long


class Message(NamedTuple):
    """What a connection sends; `arrived` is called when it has left, within a host at once."""

    to: Host
    nbytes: int
    arrived: Callable[[], None]


class Sender:
    """Some of a host's connections, to reducers or to workers, with an actor that serves them.

    Each connection sends one message at a time, and all send at once. An empty message to the actor
    says that something was posted.
    """

    def __init__(self, host: Host, name: str) -> None:
        self.host = host
        self._due: deque[tuple[float, Message]] = deque()  # by time
        self._queues: dict[Host, deque[Message]] = {}  # by receiver; the first one is being sent
        self._bell = Mailbox.by_name(name)
        self._rung = False
        self._comms: list[Comm] = []  # the first one is of the bell
        self._sent: list[Message] = []  # what each other one sends
        Actor.create(name, host, self._run).daemonize()

    def post(self, when: float, message: Message) -> None:
        """Send a message when its time has come, and those before it have left."""
        self._due.append((when, message))
        if not self._rung:
            self._rung = True
            self._bell.put_init(None, 0).detach()

    def _run(self) -> None:
        comm, self._heard = self._bell.get_async()
        self._comms = [comm]
        while True:
            while self._due and self._due[0][0] <= Engine.clock:
                self._queue(self._due.popleft()[1])
            due_s = self._due[0][0] - Engine.clock if self._due else -1.0
            ended = Comm.wait_any_for(self._comms, due_s)
            if ended == 0:
                self._rung = False
                self._comms[0], self._heard = self._bell.get_async()
            elif ended > 0:
                self._end(ended)

    def _queue(self, message: Message) -> None:
        if message.to is self.host:
            message.arrived()
            return
        queue = self._queues.setdefault(message.to, deque())
        queue.append(message)
        if len(queue) == 1:
            self._start(message)

    def _start(self, message: Message) -> None:
        self._comms.append(Comm.sendto_async(self.host, message.to, message.nbytes))
        self._sent.append(message)

    def _end(self, index: int) -> None:
        del self._comms[index]
        message = self._sent.pop(index - 1)
        queue = self._queues[message.to]
        queue.popleft()
        if queue:
            self._start(queue[0])
        message.arrived()


class AllReduce:
    """The rules of docs/protocol.md: who sends which chunk, and when.

    Attributes:
        end_s: when the last result has come; 0 until then.
    """

    def __init__(self, job: Job, workers: list[Host], reducers: list[Host]) -> None:
        self._job = job
        self._chunks = -(-job.shard_bytes // job.chunk_bytes)
        self._hosts = workers, reducers
        self._workers = self._senders("worker", workers, len(reducers))
        self._reducers = self._senders("reducer", reducers, len(workers))
        self._missing = [[job.workers] * self._chunks for _ in reducers]
        self._results = job.workers * job.reducers * self._chunks
        self._done = Semaphore(0)
        self.end_s = 0.0

    def _senders(self, kind: str, hosts: list[Host], connections: int) -> list[list[Sender]]:
        parts = range(-(-connections // CONNECTIONS))
        return [[Sender(host, f"{kind}-{host.name}-{part}") for part in parts] for host in hosts]

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

        message = Message(self._hosts[1][reducer], self._nbytes(chunk), arrived)
        self._workers[worker][reducer // CONNECTIONS].post(when, message)

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

        message = Message(self._hosts[0][worker], self._nbytes(chunk), arrived)
        self._reducers[reducer][worker // CONNECTIONS].post(when, message)

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
