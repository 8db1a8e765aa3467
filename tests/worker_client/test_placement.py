"""Which ranks share a node."""

import os
import shutil
import subprocess
import sys

import pytest

from worker_client.communicators.placement import NodePlace, arrange, host_identity


def test_ranks_with_one_key_share_a_node():
    for rank in range(6):
        place = arrange("000111", rank)
        assert place == NodePlace(((0, 1, 2), (3, 4, 5)), rank // 3, rank % 3)
        assert place.peers == ((0, 1, 2), (3, 4, 5))[rank // 3]
        assert place.across == (rank % 3, rank % 3 + 3)


def test_launchers_may_deal_ranks_out_in_turn():
    place = arrange(["b", "a", "c"] * 2, 4)
    assert place == NodePlace(((0, 3), (1, 4), (2, 5)), 1, 1)
    assert place.across == (3, 4, 5)


@pytest.mark.parametrize("keys", ["0", "0000", "0123", "00011", "0001"])
def test_one_node_single_ranks_and_unequal_nodes_have_no_hierarchy(keys):
    assert arrange(keys, 0) is None


IDENTITY = """
from worker_client.communicators.placement import host_identity
print(host_identity())
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="hides a boot's number: needs root"
)
def test_a_host_that_hides_its_boot_is_itself_as_well():
    """A sandbox may have the file, and nothing in it that can be read."""
    script = 'mount --bind /proc/$$/mem /proc/sys/kernel/random/boot_id && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", IDENTITY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "mount" in done.stderr:
        pytest.skip("the kernel refuses mounts")
    name, _, inode = host_identity().split("/")
    assert done.stdout.strip() == f"{name}//{inode}", done.stderr
