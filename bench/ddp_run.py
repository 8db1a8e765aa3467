"""The parent's side of `bench.ddp_worker`: starts the ranks in a lab and hears their reports."""

from dataclasses import dataclass
from typing import Any

from bench import ddp_models
from bench.ddp_figures import NO_OP, OURS, Reports
from harness import pool
from harness.ranks import Ranks
from lab import Lab
from worker_client.ddp import DEFAULT_BUCKET_CAP_MB

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
        HarnessError: a process failed; the message holds the end of what it said.
    """
    workers, others = lab.hosts[: spec.workers], lab.hosts[spec.workers :]
    reducers = pool.start(others[: spec.reducers])
    reports = Reports(spec.workers)
    arguments = {
        "model": spec.model,
        "compute_s": spec.compute_s,
        "variants": spec.variants,
        "steps": spec.steps,
        "warmup": WARMUP_STEPS,
        "rounds": spec.rounds,
    }
    servers = [reducer.address for reducer in reducers]
    with Ranks("bench.ddp_worker", workers, arguments, servers) as ranks:
        while ranks.running:
            if said := ranks.hear():
                reports.add(said)
    for reducer in reducers:
        reducer.stop()
    return reports
