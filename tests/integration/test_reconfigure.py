"""A group of the backend that is given other members by torch's own calls, where torch has them."""

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch.distributed as dist

from tests.conftest import local_pool
from tests.ranks import environments, ranks

pytestmark = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="needs torch 2.14, whose groups can be reconfigured"
)
COMMAND = ("-m", "tests.integration.reconfigure_rank")


def test_members_come_and_go():
    with local_pool(2) as servers:
        # The store outlives the ranks, as a launcher's does.
        given = environments(3, servers, REDUCTION_JOB="members")
        port = int(given[0]["MASTER_PORT"])
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        with ranks(given, *COMMAND, talk=True) as old:
            for rank in old:
                assert rank.stdout.readline() == "ready\n", old.report()
            old[2].kill()
            for rank in old[:2]:
                rank.stdin.write("go on\n")
                rank.stdin.flush()
            with ranks([{**given[2], "NEW": "1"}], *COMMAND) as new:
                assert old.results(killed=[2]) == [5, 6]
                assert new.results() == [1]
        assert store.num_keys() > 0
