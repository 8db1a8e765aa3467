"""Hosts that are far apart: round trips, rates and losses are those that were asked for."""

import shutil
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from lab import Lab, LabUnavailable
from tests.commands import run_command
from tests.lab.conftest import own_keeper
from tests.waits import eventually

ROOT = Path(__file__).parent.parent.parent
PYTHON = [sys.executable, "-S", "-c"]
PAYLOAD = 0.957  # of the link's rate, as in test_lab.py
ROUND_TRIPS = (20, 100, 200)
ECHO = """
import socket
s = socket.create_server(("", 0))
print(s.getsockname()[1], flush=True)
c, _ = s.accept()
while data := c.recv(100): c.sendall(data)
"""
ASK = """
import socket, sys, time
s = socket.create_connection((sys.argv[1], int(sys.argv[2])))
for _ in range(5):
    start = time.monotonic()
    s.sendall(b"x"); s.recv(100)
    print(time.monotonic() - start)
"""
COUNT = """
import socket
s = socket.socket(type=socket.SOCK_DGRAM)
s.setsockopt(socket.SOL_SOCKET, 33, 1 << 23)  # SO_RCVBUFFORCE: the socket itself loses none
s.bind(("", 0)); s.settimeout(20)
print(s.getsockname()[1], flush=True)
n = 0
try:
    while s.recv(9):
        n += 1
        s.settimeout(1)  # from the first one on: until then the sender starts
except TimeoutError:
    print(n)
"""
SEND = """
import socket, sys
s = socket.socket(type=socket.SOCK_DGRAM)
for _ in range(1000): s.sendto(b"x", (sys.argv[1], int(sys.argv[2])))
"""


@pytest.fixture(scope="module", autouse=True)
def compiler(namespaces):
    if not shutil.which("cc"):
        pytest.skip("there is no C compiler")


@pytest.fixture(scope="module")
def far(compiler):
    with Lab(3, 100, round_trip_ms=20) as lab:
        yield lab


def ask(server, client, listen, talk):
    """Run a program at each of two hosts, and return what the two of them say."""
    with server.start([*PYTHON, listen], stdout=PIPE) as listening:
        assert listening.stdout
        port = listening.stdout.readline().strip()
        talking = client.start([*PYTHON, talk, server.address, port], stdout=PIPE)
        told, _ = talking.communicate(timeout=20)
        heard, _ = listening.communicate(timeout=40)
    return told, heard


def round_trip_s(one, other):
    told, _ = ask(other, one, ECHO, ASK)
    return min(map(float, told.split()))  # the machine may be busy


@pytest.mark.extended_cases("20")
@pytest.mark.parametrize("round_trip_ms", ROUND_TRIPS)
def test_a_round_trip_takes_as_long_as_was_asked_for(round_trip_ms):
    with Lab(2, 100, round_trip_ms=round_trip_ms) as lab:
        found = round_trip_s(lab.hosts[0], lab.hosts[1])
    assert found == pytest.approx(round_trip_ms / 1000, rel=0.1)


@pytest.mark.extended("test_a_round_trip_takes_as_long_as_was_asked_for[100]")
def test_every_host_is_as_far_from_every_other(far):
    pairs = [(one, other) for one in far.hosts for other in far.hosts if one is not other]
    assert [round_trip_s(*pair) for pair in pairs] == [pytest.approx(0.02, rel=0.1)] * 6


@pytest.mark.extended("test_a_round_trip_takes_as_long_as_was_asked_for[100]")
@pytest.mark.skipif(not shutil.which("iperf3"), reason="needs iperf3: make test-tools")
def test_the_links_have_their_rate(far):
    assert far.payload_rate(streams=4, seconds=1) * 8e-6 == pytest.approx(PAYLOAD * 100, rel=0.05)


@pytest.mark.extended
def test_a_pulled_cable_loses_packets_until_it_is_back(far):
    one, other = far.hosts[:2]
    far.link_down(other)
    try:
        _, came = ask(other, one, COUNT, SEND)
        assert int(came) == 0
    finally:
        far.link_up(other)
    assert round_trip_s(one, other) == pytest.approx(0.02, rel=0.1)


def test_packets_are_lost_on_the_way():
    with Lab(2, loss_percent=10) as lab:
        for one, other in (lab.hosts, lab.hosts[::-1]):
            _, came = ask(other, one, COUNT, SEND)
            assert 840 <= int(came) <= 950


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


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        (None, "cc` is missing: install gcc"),
        ("echo that is no C >&2; exit 1", "cannot be compiled: that is no C"),
    ],
)
def test_without_a_compiler_that_takes_the_program_a_lab_says_so(
    compiler, said, monkeypatch, tmp_path
):
    if compiler:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "cc").chmod(0o755)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    with pytest.raises(LabUnavailable, match=said):
        Lab(2, round_trip_ms=20).__enter__()
