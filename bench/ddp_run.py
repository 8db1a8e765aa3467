"""The parent's side of `bench.ddp_worker`: starts the ranks in a lab and hears their reports."""

from __future__ import annotations

import json
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

from bench import ddp_models, pool
from bench.crew import ROOT, CrewError
from bench.ddp_figures import NO_OP, OURS, Reports
from worker_client.ddp import DEFAULT_BUCKET_CAP_MB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.lab import Host, Lab

WARMUP_STEPS = 3
TORCH_BYTES = 400 << 20  # of a process that has imported torch


@dataclass(frozen=True)
class Spec:
    """What is to be measured; the command line's options describe it."""

    model: str
    workers: int
    reducers: int
    compute_s: float
    gloo_caps_mb: tuple[int, ...]
    steps: int
    rounds: int

    @property
    def variants(self) -> list[dict[str, Any]]:
        """Arguments of the ranks' `Variant`, ours first."""
        cap = DEFAULT_BUCKET_CAP_MB
        gloo = [
            # 25 is DDP's default, and only as the default does it come with a small first bucket.
            {"name": f"gloo-{mb}", "hook": "gloo", "cap_mb": None if mb == 25 else mb}
            for mb in self.gloo_caps_mb
        ]
        return [
            {"name": OURS, "hook": "reducers", "cap_mb": cap},
            *gloo,
            {"name": NO_OP, "hook": "no-op", "cap_mb": cap},
        ]

    @property
    def memory_bytes(self) -> int:
        """What all ranks need: per variant weights and gradients, and some of them once more."""
        copies = 2 * len(self.variants) + 2
        return self.workers * (TORCH_BYTES + copies * ddp_models.nbytes(self.model))


def measure(spec: Spec, lab: Lab) -> Reports:
    """Train in a lab with a host per worker and one per reducer.

    Raises:
        CrewError: a process failed; the message holds the end of what it said.
    """
    workers, others = lab.hosts[: spec.workers], lab.hosts[spec.workers :]
    reducers = pool.start(others[: spec.reducers])
    reports = Reports(spec.workers)
    for said in _reports(spec, workers, [reducer.address for reducer in reducers]):
        reports.add(said)
    for reducer in reducers:
        reducer.stop()
    return reports


def _reports(spec: Spec, hosts: Sequence[Host], servers: list[str]) -> Iterator[dict[str, Any]]:
    """Run all ranks to their end and yield what they report, as it comes."""
    arguments = {
        "model": spec.model,
        "compute_s": spec.compute_s,
        "variants": spec.variants,
        "steps": spec.steps,
        "warmup": WARMUP_STEPS,
        "rounds": spec.rounds,
    }
    environment = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(len(hosts)),
        "GLOO_SOCKET_IFNAME": "lo" if hosts[0].address == "127.0.0.1" else "eth0",
        "REDUCTION_SERVERS": ",".join(servers),
        "REDUCTION_INSECURE": "1",  # the lab is private, and embedded reducers meet in it
    }
    command = [sys.executable, "-m", "bench.ddp_worker", json.dumps(arguments)]
    lines: queue.Queue[tuple[int, str]] = queue.Queue()
    with ExitStack() as stack:
        processes, said = [], []
        for rank, host in enumerate(hosts):
            said.append(stack.enter_context(tempfile.TemporaryFile("w+")))
            process = host.start(
                command,
                env={**environment, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=said[rank],
            )
            stack.callback(process.kill)
            threading.Thread(target=_forward, args=(rank, process, lines), daemon=True).start()
            processes.append(process)
        running = len(processes)
        while running:
            rank, line = lines.get()
            if line:
                yield json.loads(line)
            elif processes[rank].wait() == 0:
                running -= 1
            else:
                raise CrewError(_obituary(rank, processes[rank].returncode, said[rank]))


def _forward(
    rank: int, process: subprocess.Popen[str], lines: queue.Queue[tuple[int, str]]
) -> None:
    """Pass on a rank's lines, and an empty one at its end."""
    assert process.stdout
    for line in process.stdout:
        lines.put((rank, line))
    lines.put((rank, ""))


def _obituary(rank: int, code: int, said: IO[str]) -> str:
    said.seek(0)
    lines = said.read().strip().splitlines()
    return "\n".join([f"rank {rank} ended with code {code}", *lines[-5:]])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
