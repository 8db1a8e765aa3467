"""Where ranks meet: what their jobs are called, and what they hear if they cannot meet."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from reducer.errors import ConfigError, MembershipError, MismatchError, ReductionTimeout
from reducer.wire.constants import MAX_JOB_NAME_BYTES
from reducer.wire.job_names import MAX_OWNER_BYTES, owner
from tests.ranks import environments, ranks
from worker_client import config
from worker_client.client import bootstrap
from worker_client.client.bootstrap import Topology
from worker_client.client.rendezvous import Rendezvous
from worker_client.config import NAMED

torch = pytest.importorskip("torch", reason="needs torch")


def none(timeout_s):
    raise AssertionError("nobody asked for a group")


def group(name):
    return Rendezvous(0, [0], torch.distributed.HashStore(), make_private=none, name=name)


def test_names_of_groups_fit_and_begin_with_what_a_key_is_bound_to():
    assert group("").named("train") == "train"
    assert group("3").named("train") == "train.3"
    long = "ä" * (MAX_JOB_NAME_BYTES // 2)
    names = {group(name).named(long) for name in ("1", "2")}
    assert len(names) == 2
    assert all(len(name.encode()) <= MAX_JOB_NAME_BYTES for name in names)
    owned = "k" * MAX_OWNER_BYTES
    name = group("3").named(f"{owned}/{'long' * 30}")
    assert owner(name) == owned
    assert len(name) <= MAX_JOB_NAME_BYTES - len(NAMED)


@pytest.fixture(params=[False, True])
def store(request, tmp_path):
    here = torch.distributed
    return here.FileStore(str(tmp_path / "store"), 2) if request.param else here.HashStore()


def test_ranks_of_a_run_share_what_others_have_not():
    said = []
    for _ in range(2):
        store = torch.distributed.HashStore()
        ranks = [Rendezvous(rank, [0, 1], store, make_private=none) for rank in range(2)]
        runs = {bootstrap._run(config.load(servers="a:1"), each, 2) for each in ranks}
        assert len(runs) == 1
        said += runs
    assert len(set(said)) == 2
    assert all(said)


def test_what_is_withdrawn_is_gone(store):
    ranks = [Rendezvous(rank, [0, 1], store, timeout_s=0.2) for rank in range(2)]
    ranks[0].share("secret", "sesame")
    ranks[0].share("job", "train")
    assert [rank.read("secret", 0) for rank in ranks] == ["sesame"] * 2
    ranks[0].withdraw("secret")
    with pytest.raises(ReductionTimeout):
        ranks[1].read("secret", 0)
    assert ranks[1].read("job", 0) == "train"


def test_a_rank_that_does_not_come_is_named(store):
    waiting = Rendezvous(0, [4, 7], store, timeout_s=0.2)
    with pytest.raises(ReductionTimeout, match=r"rank 7 did not join the job within 0\.2 s") as one:
        waiting.read("run", 1)
    assert one.value.missing == (7,)


def test_a_rank_that_fails_in_any_way_keeps_nobody_waiting():
    store = torch.distributed.HashStore()
    ranks = [Rendezvous(rank, [4, 7], store, timeout_s=0.2) for rank in range(2)]

    def fail():
        raise OSError("too many open files")

    with pytest.raises(OSError, match="too many"):
        ranks[1].gather_made("way", fail)
    with pytest.raises(ConfigError, match="rank 7: too many open files"):
        ranks[0].gather_made("way", lambda: "10.0.0.1")


KEEPER = """
import sys
import torch
store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_a_store_that_is_gone_is_no_rank_that_is_late():
    with ranks(environments(1), "-c", KEEPER, talk=True) as (keeper,):
        port = int(keeper.stdout.readline())
        store = torch.distributed.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))
        waiting = Rendezvous(1, [0, 1], store, timeout_s=60.0)
        waiting.share("run", "here")
        assert waiting.read("run", 1) == "here"
        threading.Timer(0.2, keeper.kill).start()

        def share():
            for _ in range(100):  # the first is written before the system knows
                waiting.share("run", "still here")
                time.sleep(0.01)

        for ask in (lambda: waiting.read("run", 0), share):
            with pytest.raises(MembershipError, match=r"torch's store, .*, is gone") as gone:
                ask()
            assert "look at the output of the other ranks" in str(gone.value)
            assert "\n" not in str(gone.value)  # torch's own trace of C++ is left out


POOL = ("10.0.0.5:5555", "10.0.0.6:5555")


@pytest.mark.parametrize(
    ("topologies", "field", "ill"),
    [
        ((Topology(False, POOL), Topology(False, POOL[:1])), "", ()),
        ((Topology(True, ()), Topology(True, ())), "", ()),
        # Rank 0 of a pool asks nobody: it would wait for ranks that may come later.
        ((Topology(False, POOL), Topology(True, ())), "REDUCTION_SERVERS", (1,)),
        ((Topology(True, ()), Topology(False, POOL)), "REDUCTION_SERVERS", (0, 1)),
        ((Topology(True, POOL), Topology(False, POOL)), "REDUCTION_EMBEDDED", (0, 1)),
    ],
)
def test_ranks_that_look_for_reducers_elsewhere_say_so(topologies, field, ill):
    store = torch.distributed.HashStore()

    def start(rank):
        try:
            group = Rendezvous(rank, [0, 1], store, timeout_s=20.0)
            bootstrap._agree_on_topology(group, topologies[rank])
        except MismatchError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(start, range(2)))
    assert tuple(rank for rank, error in enumerate(found) if error) == ill
    for error in filter(None, found):
        assert error.field == field
        assert {error.rank, error.other_rank} == {0, 1}
        for rank, topology in enumerate(topologies):
            assert f"rank {rank} says {topology}" in str(error)
