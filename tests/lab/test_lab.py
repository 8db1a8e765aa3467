"""Hosts on one machine: they reach each other at the rate of their links, and nobody else."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE

import pytest

from lab import Lab, LabUnavailable, network
from tests.waits import within_s

TRANSFER = [sys.executable, "-S", str(Path(__file__).with_name("transfer.py"))]
PAYLOAD = 0.957  # of the link's rate: 1448 bytes in each Ethernet frame of 1514


@pytest.fixture(params=["namespaces", "loopback"])
def hosts(request):
    """The same three hosts, of either kind."""
    if request.param == "namespaces":
        yield request.getfixturevalue("lab").hosts
    else:
        with Lab.loopback(hosts=3) as loopback:
            yield loopback.hosts


def line(process):
    assert process.stdout
    return process.stdout.readline().strip()


def say(host, script, **environment):
    done = host.start(["sh", "-c", script], env=environment, stdout=PIPE)
    output, _ = done.communicate(timeout=20)
    assert done.returncode == 0
    return output.strip()


def megabits(sender, receiver, total=5_000_000):
    """Payload rate of one transfer, in Mbit/s."""
    server = receiver.start([*TRANSFER, "serve", str(total)], stdout=PIPE)
    client = sender.start([*TRANSFER, "send", receiver.address, line(server), str(total)])
    rate = float(line(server))
    assert client.wait(20) == 0
    assert server.wait(20) == 0
    return rate * 8e-6


def test_every_host_reaches_every_other_by_address_and_by_name(hosts):
    for sender in hosts:
        for receiver in hosts:
            for address in (receiver.address, receiver.name):
                server = receiver.start([*TRANSFER, "echo"], stdout=PIPE)
                client = sender.start(
                    [*TRANSFER, "ask", address, line(server)], stdin=PIPE, stdout=PIPE
                )
                output, _ = client.communicate("hello\n", timeout=20)
                assert output == "hello\n"
                assert server.wait(20) == 0


def test_no_way_leads_out_of_a_lab(lab):
    assert say(lab.hosts[0], "ip route").startswith("10.77.")
    assert "default" not in say(lab.hosts[0], "ip route")
    outside = subprocess.run(["ip", "-o", "link"], stdout=PIPE, text=True, check=True).stdout
    assert "10.77." not in outside
    assert network.PREFIX not in outside


def test_a_link_has_its_rate_each_way_until_it_is_changed_or_lifted(lab):
    one, other = lab.hosts[:2]
    lab.set_rate(other, None)  # what is measured is the one's link alone
    try:
        for rate in (100, 40):
            lab.set_rate(one, rate)
            for pair in ((one, other), (other, one)):
                assert megabits(*pair, 3_000_000) == pytest.approx(PAYLOAD * rate, rel=0.06)
        lab.set_rate(one, None)
        lab.set_rate(one, None)
        assert megabits(one, other, 20_000_000) > 400
    finally:
        lab.set_rate(one, 100)
        lab.set_rate(other, 100)
    assert lab.mbit == 100


@pytest.mark.extended("test_a_link_has_its_rate_each_way_until")
@pytest.mark.skipif(not shutil.which("iperf3"), reason="needs iperf3: make test-tools")
def test_the_payload_rate_is_what_iperf3_reaches_and_is_measured_once(lab):
    rate = lab.payload_rate()
    assert rate * 8e-6 == pytest.approx(PAYLOAD * 100, rel=0.03)
    start = time.monotonic()
    assert lab.payload_rate() == rate
    within_s(0.5, start)


def test_a_pulled_cable_stops_traffic_and_a_connection_survives_it(lab):
    one, other = lab.hosts[:2]
    server = other.start([*TRANSFER, "echo"], stdout=PIPE)
    client = one.start([*TRANSFER, "ask", other.address, line(server)], stdin=PIPE, stdout=PIPE)
    assert client.stdin
    assert client.stdout
    client.stdin.write("before\n")
    client.stdin.flush()
    assert line(client) == "before"
    os.set_blocking(client.stdout.fileno(), False)
    lab.link_down(other)
    try:
        client.stdin.write("during\n")
        client.stdin.flush()
        time.sleep(1)
        with pytest.raises(BlockingIOError):
            os.read(client.stdout.fileno(), 100)
    finally:
        lab.link_up(other)
    os.set_blocking(client.stdout.fileno(), True)
    assert line(client) == "during"
    assert megabits(one, other) == pytest.approx(PAYLOAD * 100, rel=0.06)


def test_two_labs_at_once_share_nothing(lab):
    with Lab(hosts=3, mbit=40) as second:
        assert {host.name for host in lab.hosts}.isdisjoint(host.name for host in second.hosts)
        assert {host.address for host in lab.hosts}.isdisjoint(
            host.address for host in second.hosts
        )
        assert megabits(second.hosts[0], second.hosts[1], 3_000_000) == pytest.approx(
            PAYLOAD * 40, rel=0.06
        )
        with pytest.raises(LabUnavailable, match="another lab"):
            lab.link_down(second.hosts[0])
        bystander = lab.hosts[0].start(["sleep", "1000"])
    assert bystander.poll() is None
    bystander.kill()
    assert megabits(lab.hosts[0], lab.hosts[1]) == pytest.approx(PAYLOAD * 100, rel=0.06)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda _: Lab(0), "got 0"),
        (lambda _: Lab(255), "got 255"),
        (lambda _: Lab(2, -1), "got -1"),
        (lambda _: Lab(2, 100, round_trip_ms=0.1), "got 0.1"),
        (lambda _: Lab(2, 100, loss_percent=100), "got 100"),
        (lambda lab: lab.set_rate(lab.hosts[0], 100), "no links"),
        (lambda lab: lab.link_down(lab.hosts[0]), "no links"),
        (lambda lab: lab.link_up(lab.hosts[0]), "no links"),
        (lambda lab: lab.hosts[1].start(["no-such"]), "'no-such' to start in host 1"),
        (lambda lab: lab.payload_rate(), "install the package iperf3"),
    ],
)
def test_what_cannot_be_is_refused(call, said, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with Lab.loopback(2) as loopback:
        with pytest.raises((ValueError, LabUnavailable, FileNotFoundError), match=said):
            call(loopback)
        host = loopback.hosts[0]
    with pytest.raises(LabUnavailable, match="has ended"):
        host.start(["true"])
