"""What the jobs of several groups are called."""

from __future__ import annotations

import pytest

from reducer.wire.constants import MAX_JOB_NAME_BYTES
from reducer.wire.job_names import MAX_OWNER_BYTES, owner
from worker_client.client import bootstrap
from worker_client.client.rendezvous import Rendezvous
from worker_client.config import NAMED

torch = pytest.importorskip("torch", reason="needs torch")


def none(timeout_s: float) -> None:
    raise AssertionError("nobody asked for a group")


def group(name: str) -> Rendezvous:
    return Rendezvous(0, [0], torch.distributed.HashStore(), make_private=none, name=name)


def test_a_group_without_a_name_has_its_job_to_itself() -> None:
    assert group("").named("train") == "train"


def test_groups_of_one_job_have_names_that_fit() -> None:
    assert group("3").named("train") == "train.3"
    long = "ä" * (MAX_JOB_NAME_BYTES // 2)
    names = {group(name).named(long) for name in ("1", "2")}
    assert len(names) == 2
    assert all(len(name.encode()) <= MAX_JOB_NAME_BYTES for name in names)


def test_a_name_that_is_cut_begins_with_what_a_key_is_bound_to() -> None:
    owned = "k" * MAX_OWNER_BYTES
    name = group("3").named(f"{owned}/{'long' * 30}")
    assert owner(name) == owned
    assert len(name) <= MAX_JOB_NAME_BYTES - len(NAMED)


def test_ranks_of_a_run_share_what_others_have_not() -> None:
    said = []
    for _ in range(2):
        store = torch.distributed.HashStore()
        ranks = [Rendezvous(rank, [0, 1], store, make_private=none) for rank in range(2)]
        runs = {bootstrap._run(each, 2) for each in ranks}
        assert len(runs) == 1
        said += runs
    assert len(set(said)) == 2
    assert all(said)
