"""Jobs on hosts whose network loses packets, is slow, or parts them: exact, and no step lost.

`torture.faults` runs the same cases for longer.
"""

import shutil
import subprocess

import pytest

from lab import Lab, packets
from tests.lab.conftest import arrivals
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


@pytest.mark.parametrize(("way", "there", "back"), [("in", 1, 0), ("out", 0, 1), ("both", 0, 0)])
def test_packets_are_lost_in_that_direction(network, way, there, back):
    one, other, third = network.hosts[:3]
    packets.part(one, other, way)
    try:
        found = [arrivals(one, other), arrivals(other, one), arrivals(one, third)]
    finally:
        packets.heal(one)
    assert found == [there, back, 1]
    assert arrivals(one, other) == 1


def test_so_many_percent_of_packets_are_lost(network):
    one, other = network.hosts[:2]
    packets.lose(one, 10)
    try:
        for pair in ((one, other), (other, one)):
            assert 800 <= arrivals(*pair, 1000) <= 980
    finally:
        packets.heal(one)
