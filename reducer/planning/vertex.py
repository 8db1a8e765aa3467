"""A job of Vertex AI: workers in the pools 0 and 1, reducers in `workerPoolSpecs[2]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from reducer.errors import ConfigError


@dataclass(frozen=True)
class Machines:
    """What a job runs on.

    Attributes:
        workers: number of machines with workers, at least 1.
        reducers: number of those with reducers, at least 1.
        worker_machine, reducer_machine: machine types, such as ``n1-highcpu-16``.
        worker_image, reducer_image: container images, with this package in both.
        command: what every container runs; it finds out from ``CLUSTER_SPEC`` what it is to be.
        accelerator, accelerator_count: of each worker's machine, such as ``NVIDIA_TESLA_V100``.
        keys: directory with the job's keys in every container, such as ``/gcs/BUCKET/keys``; None
            for no authentication, in a job whose network nobody else reaches.
    """

    workers: int
    reducers: int
    worker_machine: str
    reducer_machine: str
    worker_image: str
    reducer_image: str
    command: tuple[str, ...]
    accelerator: str | None = None
    accelerator_count: int = 0
    keys: str | None = None

    def __post_init__(self) -> None:
        if self.workers < 1 or self.reducers < 1:
            raise ConfigError(
                f"a job needs at least 1 worker and 1 reducer, got {self.workers} and "
                f"{self.reducers}"
            )
        if bool(self.accelerator) != (self.accelerator_count > 0):
            raise ConfigError("give the type of accelerators and their number, or neither")


def custom_job_spec(machines: Machines) -> dict[str, Any]:
    """Return a `CustomJobSpec`: what ``gcloud ai custom-jobs create --config`` reads.

    Pool 0 is one machine, the primary; pool 1 the other workers, and ``{}`` if there are none,
    because pools are known by their position.
    """
    machine: dict[str, Any] = {"machineType": machines.worker_machine}
    if machines.accelerator:
        machine["acceleratorType"] = machines.accelerator
        machine["acceleratorCount"] = machines.accelerator_count
    worker = _container(machines, machines.worker_image)
    reducer = _container(machines, machines.reducer_image)
    if machines.keys is None:
        reducer["env"] = [{"name": "REDUCTION_INSECURE", "value": "1"}]
    others = machines.workers - 1
    return {
        "workerPoolSpecs": [
            _pool(machine, 1, worker),
            _pool(machine, others, worker) if others else {},
            _pool({"machineType": machines.reducer_machine}, machines.reducers, reducer),
        ]
    }


def _container(machines: Machines, image: str) -> dict[str, Any]:
    container: dict[str, Any] = {"imageUri": image, "command": list(machines.command)}
    if machines.keys is not None:
        container["env"] = [{"name": "REDUCTION_KEYS", "value": machines.keys}]
    return container


def _pool(machine: dict[str, Any], count: int, container: dict[str, Any]) -> dict[str, Any]:
    return {"machineSpec": machine, "replicaCount": count, "containerSpec": container}
