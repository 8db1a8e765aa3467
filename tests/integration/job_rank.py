"""One rank of test_faults: makes calls, or trains, until it is told to stop, whatever is lost.

Started as ``python -m tests.integration.job_rank SPEC`` (JSON, see `Spec`) with a launcher's
environment, or with REDUCTION_JOIN=1. It reports every step: whose contributions are in the results
(of a training: what bits its weights have), and what its client says of ranks and reducers.
"""

import json
import logging
import os
import sys
import threading
import time
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import worker_client
from harness.reports import digest
from reducer.errors import ReductionError
from torture.guarantee_backward import as_tensor
from torture.guarantee_judge import Judge
from torture.guarantee_oracle import tells
from torture.guarantee_plan import Call, Plan
from worker_client import elastic

# Who joins gets a rank of the job's, perhaps another one.
PROCESS = int(os.environ.get("PROCESS") or os.environ["RANK"])
KINDS = [  # dtype, op, elements: several chunks to each reducer, one, less than one, none
    ("float32", "mean", 300_000),
    ("bfloat16", "sum", 70_001),
    ("float16", "mean", 1_000),
    ("int64", "sum", 5),
    ("float64", "max", 9_999),
    ("uint8", "min", 40_000),
    ("float64", "mean", 100),
    ("float32", "sum", 0),
    ("int64", "sum", 100_000),
    ("int8", "product", 77),
    ("int32", "sum", 200_000),
    ("float32", "mean", 1),
]
IN_FLIGHT = 4
MOST_RANKS = 256
BATCH = 120  # over all ranks


class Spec(NamedTuple):
    """What a rank does.

    Attributes:
        trains: whether it trains a model of DDP's, instead of making calls.
        group: ranks of its process group: ``all``, or ``own`` where it is alone; "" for none.
        rest_s: time between two steps, in which it computes and hears of nothing.
        warm: so many steps are made at full speed first.
        stays_s: how long it stays after the last step, times its place behind rank `first`.
    """

    trains: bool = False
    group: str = ""
    rest_s: float = 0.005
    warm: int = 0
    stays_s: float = 0.0
    first: int = 0


class Warnings(logging.Handler):
    """Reports what the client warns of."""

    def emit(self, record):
        say("warning", text=record.getMessage())


def say(event, **values):
    sys.stdout.write(json.dumps({"event": event, "process": PROCESS, **values}) + "\n")
    sys.stdout.flush()


class Calls:
    """All-reduces of every kind, some in flight together, and the judge of their results."""

    def __init__(self, client):
        self._client = client
        plan = Plan("", client.world_size, extras=False, wire_dtype="", troubles=0.0)
        some = os.environ.get("REDUCTION_ON_RANK_LOST") == "continue"
        exact = "REDUCTION_FALLBACK" in os.environ  # there values are added in any order
        self._judge = Judge(plan, client.rank, "data", exact=exact, nodes=None, elastic=some)

    def step(self, number):
        """Make a step's calls; return whose contributions each result has, if it tells that."""
        running = []
        for at in range(number * IN_FLIGHT, (number + 1) * IN_FLIGHT):
            dtype, op, count = KINDS[at % len(KINDS)]
            call = Call((0, at, 0), None, dtype, op, count, False, None, False, None, None, False)
            values = self._judge.contribution(call)
            data = values.view(ml_dtypes.bfloat16) if dtype == "bfloat16" else values
            tensor = (at + at // len(KINDS)) % 2
            work = self._client.all_reduce(as_tensor(data) if tensor else data, op=op)
            running.append((call, values, work))
        odd = np.full(9, np.nan if self._client.rank == 1 else 1.0)
        largest = self._client.all_reduce(odd, op="max")  # in every order of ranks
        whose = [self._finish(*one) for one in running]
        largest.wait(60)
        assert np.isnan(odd).all() == np.isnan(odd).any(), odd
        return {"whose": whose, "odd": bool(np.isnan(odd[0]))}

    def _finish(self, call, values, work):
        work.wait(60)
        wrong = self._judge.judge(call, values, None, ())
        assert not wrong, f"{call}: {wrong}"
        whose = self._judge.whose(call, values) if tells(call) else None
        values[:] = 0  # as a caller may, while others have yet to finish
        return whose

    def end(self):
        """Ask for something else at rank 0 than elsewhere; the next calls are right again."""
        try:
            self._client.all_reduce(torch.ones(100 + (self._client.rank == 0)), op="sum").wait(60)
        except ReductionError as error:
            return {"differ": f"{type(error).__name__}: {error}", "after": self.step(10**6)}
        return {"differ": "nothing"}

    def leave(self):
        """Begin calls that nobody waits for, and one that nobody else makes."""
        for _ in range(1 + (self._client.rank == 0)):
            self._client.all_reduce(torch.ones(300_000))


class Training:
    """A training by DDP, of ranks that each have a part of a batch that all share."""

    def __init__(self, client, group):
        self._client = client
        self._own = group == "own"
        self._changes = []
        if self._own:
            client.on_membership(lambda change: self._changes.append(tuple(map(list, change))))
        # Who joins gets the weights, so these may differ.
        torch.manual_seed(client.rank if client.rank >= 4 else 0)
        norm = [] if self._own else [nn.BatchNorm1d(512)]  # whose buffers one rank gives the others
        self._layers = nn.Sequential(
            *(nn.Linear(64, 512), *norm, nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 10))
        )
        self._model = DistributedDataParallel(
            self._layers, bucket_cap_mb=0.5, find_unused_parameters=self._own
        )
        worker_client.attach(self._model, client)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        data = torch.Generator().manual_seed(0)
        self._inputs = torch.randn(1200, 64, generator=data)
        self._targets = (self._inputs @ torch.randn(64, 10, generator=data)).argmax(1)

    def synchronized(self, number):
        """Let others join; return the number of the step that all are about to make."""
        if not self._own:
            return number
        common = elastic.sync(self._layers, self._optimizer, step=number)
        return number if common is None else common["step"]

    def step(self, number):
        present = self._client.present
        batch = np.random.default_rng(number).permutation(len(self._targets))[:BATCH]
        mine = torch.from_numpy(batch[present.index(self._client.rank) :: len(present)].copy())
        self._optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self._model(self._inputs[mine]), self._targets[mine])
        loss.backward()
        self._optimizer.step()
        found = {"digest": digest(parameter.detach() for parameter in self._layers.parameters())}
        if self._own:
            with torch.no_grad():
                whole = nn.functional.cross_entropy(self._layers(self._inputs), self._targets)
            found |= {"over": self._contributors(None), "named": self._contributors("named")}
            found |= {"loss": float(whole), "changes": self._changes}
        return found

    def _contributors(self, name):
        """Which ranks an all-reduce is over: each contributes a one at its own place."""
        ones = np.zeros(MOST_RANKS, np.int64)
        ones[self._client.rank] = 1
        self._client.all_reduce(ones, "sum", name=name).wait(60)
        return np.flatnonzero(ones).tolist() if ones.max() == 1 else [-1]


def listen(stop_at):
    line = sys.stdin.readline()
    if line:
        stop_at.append(int(line))


def run(spec, client, stop_at):
    """Make steps until told to stop; return whether all of them went well."""
    work = Training(client, spec.group) if spec.trains else Calls(client)
    number = 0
    while not (stop_at and number >= stop_at[0]):
        time.sleep(0.0 if number < spec.warm else spec.rest_s)
        try:
            number = work.synchronized(number) if spec.trains else number
            said = work.step(number)
        except ReductionError as error:
            say("error", error=f"{type(error).__name__}: {error}")
            return False
        about = {"rank": client.rank, "present": client.present, "in_use": client.in_use}
        about["pid"] = os.getpid()
        say("step", step=number, **said, **about, **client.counters._asdict())
        number += 1
    fails = os.environ.get("REDUCTION_FALLBACK")
    say("end", **(work.end() if fails else {}))
    if fails:
        work.leave()
    return True


def main():
    spec = Spec(**json.loads(sys.argv[1]))
    logging.getLogger("worker_client").addHandler(Warnings(logging.WARNING))
    torch.set_num_threads(1)
    if spec.group == "all":
        dist.init_process_group("gloo")
    client = worker_client.init()
    if spec.group == "own":  # process groups cannot grow
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    stop_at = []
    threading.Thread(target=listen, args=(stop_at,), daemon=True).start()
    well = run(spec, client, stop_at)
    whole = well and len(client.present) == client.world_size
    time.sleep(spec.stays_s * ((client.rank - spec.first) % client.world_size))
    client.shutdown()
    if spec.group != "own" and not whole:
        sys.stdout.flush()
        os._exit(0)  # a process group does not survive the death of a rank, nor its own end then
    if spec.group == "all":
        dist.barrier()
    if spec.group:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
