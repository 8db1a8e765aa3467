"""Hosts that are far apart: round trips, rates and losses are those that were asked for."""

import shutil
import sys
from itertools import permutations
from pathlib import Path
from subprocess import PIPE

import pytest

from lab import Lab, LabUnavailable
from tests.commands import run_command
from tests.lab.conftest import PAYLOAD, answers, arrivals, own_keeper
from tests.waits import eventually

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module", autouse=True)
def compiler(namespaces):
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")


def round_trip_s(one, other):
    return min(seconds for _, seconds in answers(one, other, "abcde"))  # the machine may be busy


def test_a_round_trip_takes_as_long_as_was_asked_for():
    with Lab(2, 100, round_trip_ms=100) as lab:
        assert round_trip_s(*lab.hosts) == pytest.approx(0.1, rel=0.1)


@pytest.mark.extended("test_a_round_trip_takes_as_long_as_was_asked_for")
@pytest.mark.skipif(not shutil.which("iperf3"), reason="needs iperf3: make test-tools")
def test_every_pair_has_its_distance_and_links_have_their_rate_and_a_cable_that_can_be_pulled():
    with Lab(3, 100, round_trip_ms=20) as lab:
        pairs = [*permutations(lab.hosts, 2)]
        assert [round_trip_s(*pair) for pair in pairs] == [pytest.approx(0.02, rel=0.1)] * 6
        rate = max(lab.payload_rate(streams=4, seconds=1) for _ in range(2))
        assert rate * 8e-6 == pytest.approx(PAYLOAD * 100, rel=0.05)
        lab.link_down(lab.hosts[1])
        assert arrivals(*pairs[0], 1000) == 0
        lab.link_up(lab.hosts[1])
        assert round_trip_s(*pairs[0]) == pytest.approx(0.02, rel=0.1)


def test_packets_are_lost_on_the_way():
    with Lab(2, loss_percent=10) as lab:
        for pair in (lab.hosts, lab.hosts[::-1]):
            assert 840 <= arrivals(*pair, 1000) <= 950


def test_packets_are_those_of_the_network():
    with Lab(1, round_trip_ms=20) as lab:
        shown = lab.hosts[0].start(["ip", "-d", "link", "show", "eth0"], stdout=PIPE)
        assert " gso_max_segs 1 " in shown.communicate(timeout=20)[0]


def test_the_hosts_use_the_congestion_control_that_was_asked_for():
    with Lab(1, congestion="reno") as lab:
        file = "/proc/sys/net/ipv4/tcp_congestion_control"
        shown = lab.hosts[0].start(["cat", file], stdout=PIPE)
        assert shown.communicate(timeout=20)[0] == "reno\n"
    with pytest.raises(LabUnavailable, match="modprobe tcp_warp"), Lab(1, congestion="warp"):
        pass


@pytest.mark.parametrize("killed", [False, True])
def test_the_cables_go_with_their_lab(killed):
    with Lab(2, round_trip_ms=20):
        (cables,) = own_keeper().children()
        assert cables.name() == "delay"
        if killed:
            own_keeper().kill()
            eventually(lambda: not cables.is_running())
    assert not cables.is_running()


def test_the_command_makes_and_shows_such_labs():
    lab = [sys.executable, "-S", "-m", "lab"]
    run = [*lab, "run", "--mbit", "100", "--round-trip-ms", "20", "--on", "0", "--"]
    done = run_command(*run, *lab, "show", cwd=ROOT)
    assert ", 100 Mbit/s, 20 ms, of process" in done.stdout
