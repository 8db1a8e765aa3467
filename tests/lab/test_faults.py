"""Jobs on hosts whose network loses packets, is slow, or parts them: exact, and no step lost.

`torture.faults` runs the same cases for longer.
"""

import shutil
import subprocess
import sys
from subprocess import DEVNULL, PIPE

import pytest

from lab import Lab, packets
from torture import fault_cases, faults
from torture.fault_cases import MBIT, REDUCERS, WORKERS, stage

COUNT = 30
SLOW_COUNT = 12  # each takes a fifth of a second then
KNOWN_S = 2.0  # until every rank knows of a reducer that is gone
NAMED_S = 4.0  # until every rank knows of a rank that is gone
STALL_S = 3.0


@pytest.fixture(scope="module")
def network(namespaces):
    """Hosts for four ranks and three reducers."""
    if not shutil.which("nft"):
        pytest.skip("needs `nft`, by which packets are lost: make test-tools")
    rule = "add table ip faults; add chain ip faults in; "
    rule += "add rule ip faults in numgen random mod 100 < 1 drop"
    tried = subprocess.run(["unshare", "--net", "nft", rule], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("the kernel loses no packets by chance")
    with Lab(WORKERS + REDUCERS, MBIT) as lab:
        yield lab


@pytest.fixture
def scene(network):
    with stage(network) as staged:
        yield staged


def check(row, count=COUNT):
    print(f"\n{faults.HEADING}\n{faults.line(row)}")  # noqa: T201 (with -s)
    assert row.wrong == 0
    assert row.errors == 0, row.notes
    assert row.false_deaths == 0, row.notes
    assert row.all_reduces >= count


@pytest.mark.extended("test_a_reducer_whose_cable_is_pulled")
def test_one_percent_of_packets_lost_loses_nobody(scene):
    check(fault_cases.loss(scene, COUNT))


@pytest.mark.extended("test_a_reducer_whose_cable_is_pulled")
def test_a_reducer_at_a_tenth_of_the_rate_is_not_lost(scene):
    row = fault_cases.slow(scene, SLOW_COUNT)
    check(row, SLOW_COUNT)
    assert row.rate < MBIT / 8 / 3  # the link was slow indeed


def check_replaced(row):
    check(row)
    assert row.detected_s <= KNOWN_S
    assert row.stall_s <= STALL_S
    assert row.back_s <= fault_cases.SETTLE_S


def test_a_reducer_whose_cable_is_pulled_is_replaced_until_it_is_back(scene):
    check_replaced(fault_cases.pulled(scene, COUNT))


@pytest.mark.extended("test_a_reducer_whose_cable_is_pulled")
@pytest.mark.parametrize("way", ["both", "in", "out"])
def test_a_rank_and_a_reducer_that_are_parted_lose_no_step(scene, way):
    check_replaced(fault_cases.partition(scene, COUNT, way))


@pytest.mark.extended("test_a_reducer_whose_cable_is_pulled")
def test_a_rank_whose_cable_is_pulled_is_named_in_time(scene):
    row = fault_cases.rank_pulled(scene, COUNT)
    check(row)
    assert row.detected_s <= NAMED_S


# -- the faults themselves ------------------------------------------------------------------------


RECEIVE = """
import socket, sys, time
s = socket.socket(type=socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, 33, 1 << 23)  # SO_RCVBUFFORCE: the socket itself loses none
s.bind(("", 5555))
print(flush=True)
sys.stdin.read()
s.settimeout(0.1)
n = 0
try:
    while s.recv(9): n += 1
except TimeoutError:
    print(n)
"""
SEND = """
import socket, sys
s = socket.socket(type=socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])):
    try: s.sendto(b"x", (sys.argv[1], 5555))
    except PermissionError: pass
"""


def reaches(sender, receiver, lab, datagrams=1):
    """Return how many of some datagrams arrive."""
    python = [sys.executable, "-S", "-c"]
    address = lab.hosts[receiver].address
    with lab.hosts[receiver].start([*python, RECEIVE], stdin=PIPE, stdout=PIPE) as process:
        process.stdout.readline()
        # A send may be refused where the host's own rules drop the datagram.
        send = [*python, SEND, address, str(datagrams)]
        lab.hosts[sender].start(send, stderr=DEVNULL).wait(10)
        return int(process.communicate(timeout=10)[0])


@pytest.mark.parametrize(("way", "there", "back"), [("in", 1, 0), ("out", 0, 1), ("both", 0, 0)])
def test_packets_are_lost_in_that_direction(network, way, there, back):
    packets.part(network.hosts[0], network.hosts[1], way)
    try:
        assert reaches(0, 1, network) == there
        assert reaches(1, 0, network) == back
        assert reaches(0, 2, network) == 1
    finally:
        packets.heal(network.hosts[0])
    assert reaches(0, 1, network) == 1


def test_so_many_percent_of_packets_are_lost(network):
    packets.lose(network.hosts[0], 10)
    try:
        for sender, receiver in ((0, 1), (1, 0)):
            assert 800 <= reaches(sender, receiver, network, 1000) <= 980
    finally:
        packets.heal(network.hosts[0])
