"""What the jobs of several groups are called."""

from __future__ import annotations

import pytest

from reducer.wire.constants import MAX_JOB_NAME_BYTES
from worker_client.process_group import ProcessGroup

torch = pytest.importorskip("torch", reason="needs torch")


def group(name: str) -> ProcessGroup:
    def none(timeout_s: float) -> None:
        raise AssertionError("nobody asked for a group")

    return ProcessGroup(0, [0], torch.distributed.HashStore(), make_private=none, name=name)


def test_a_group_without_a_name_has_its_job_to_itself() -> None:
    assert group("").named("train") == "train"


def test_groups_of_one_job_have_names_that_fit() -> None:
    assert group("3").named("train") == "train.3"
    long = "ä" * (MAX_JOB_NAME_BYTES // 2)
    names = {group(name).named(long) for name in ("1", "2")}
    assert len(names) == 2
    assert all(len(name.encode()) <= MAX_JOB_NAME_BYTES for name in names)
