"""Who goes before whom, where several say who a process is."""

from __future__ import annotations

import pytest

from tests.launch.environments import (
    AZURE_MPI,
    ENV,
    KUBEFLOW,
    MPICH,
    OPEN_MPI,
    SLURM,
    TORCHRUN,
    vertex,
)
from worker_client.launch import Launcher, resolve


@pytest.mark.parametrize(
    ("environments", "expected", "also"),
    [
        ([TORCHRUN, AZURE_MPI, SLURM], Launcher.TORCHRUN, [Launcher.AZURE_ML, Launcher.SLURM]),
        ([TORCHRUN, vertex(0, 0)], Launcher.TORCHRUN, [Launcher.VERTEX]),
        ([ENV, vertex(1, 0)], Launcher.ENV, [Launcher.VERTEX]),
        ([ENV, KUBEFLOW], Launcher.KUBEFLOW, [Launcher.ENV]),
        ([ENV, {"LOCAL_RANK": "1"}, KUBEFLOW], Launcher.ENV, [Launcher.KUBEFLOW]),
        ([OPEN_MPI, SLURM], Launcher.OPEN_MPI, [Launcher.SLURM]),
        ([MPICH, SLURM], Launcher.MPICH, [Launcher.SLURM]),
        ([ENV, vertex(2, 0)], Launcher.VERTEX, [Launcher.ENV]),
    ],
)
def test_who_goes_before(
    environments: list[dict[str, str]], expected: Launcher, also: list[Launcher]
) -> None:
    merged = {name: value for one in environments for name, value in one.items()}
    found = resolve(merged)
    assert found.launcher is expected
    assert [other for other in found.also if other is not Launcher.ENV] == [
        other for other in also if other is not Launcher.ENV
    ]


def test_one_process_on_each_node_is_its_rank() -> None:
    assert resolve(vertex(1, 1)).identity == (2, 3)
    assert resolve(TORCHRUN).identity == (5, 8)
    assert resolve({}).identity == (None, None)
    assert resolve(vertex(2, 1)).identity == (None, 3)
