"""Hosts on one machine: they reach each other at the rate of their links, and nobody else."""

import select
import subprocess
from subprocess import PIPE

import pytest

from lab import Lab, LabUnavailable, network
from tests.lab.conftest import PAYLOAD, TRANSFER, answers, line
from tests.waits import eventually


@pytest.fixture(params=["namespaces", "loopback"])
def hosts(request):
    """The same three hosts, of either kind."""
    if request.param == "namespaces":
        yield request.getfixturevalue("lab").hosts
    else:
        with Lab.loopback(hosts=3) as loopback:
            yield loopback.hosts


def megabits(sender, receiver, total):
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
            for name in (receiver.address, receiver.name):
                [(said, _)] = answers(sender, receiver, ["hello"], name=name)
                assert said == "hello"


def test_no_way_leads_out_of_a_lab(lab):
    routes, _ = lab.hosts[0].start(["ip", "route"], stdout=PIPE).communicate(timeout=20)
    assert routes.startswith("10.77.")
    assert "default" not in routes
    outside = subprocess.run(["ip", "-o", "link"], stdout=PIPE, text=True, check=True).stdout
    assert "10.77." not in outside
    assert network.PREFIX not in outside


def has_rate(one, other, mbit):
    """Whether a link carries as much: what a busy machine measures at times is less, or more."""
    tries = (megabits(one, other, 3_000_000) for _ in range(5))
    return any(0.94 * mbit < found < 1.06 * mbit for found in tries)


def test_a_link_has_its_rate_each_way_until_it_is_changed_or_lifted(lab):
    one, other = lab.hosts[:2]
    lab.set_rate(other, None)  # what is measured is the one's link alone
    try:
        for rate in (100, 40):
            lab.set_rate(one, rate)
            for pair in ((one, other), (other, one)):
                assert has_rate(*pair, PAYLOAD * rate)
        lab.set_rate(one, None)
        lab.set_rate(one, None)
        assert megabits(one, other, 20_000_000) > 400
    finally:
        lab.set_rate(one, 100)
        lab.set_rate(other, 100)
    assert lab.mbit == 100


def test_a_pulled_cable_stops_traffic_and_a_connection_survives_it(lab):
    one, other = lab.hosts[:2]
    server = other.start([*TRANSFER, "echo"], stdout=PIPE)
    client = one.start([*TRANSFER, "ask", other.address, line(server)], stdin=PIPE, stdout=PIPE)
    tell(client, "before")
    assert line(client).startswith("before ")
    lab.link_down(other)
    try:
        tell(client, "during")
        assert select.select([client.stdout], [], [], 1)[0] == []
    finally:
        lab.link_up(other)
    assert line(client).startswith("during ")


def tell(process, word):
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def test_two_labs_at_once_share_nothing(lab):
    with Lab(hosts=3, mbit=40) as second:
        one, other = ({(host.name, host.address) for host in each.hosts} for each in (lab, second))
        assert set(sum(one, ())).isdisjoint(sum(other, ()))
        assert has_rate(*second.hosts[:2], PAYLOAD * 40)
        with pytest.raises(LabUnavailable, match="another lab"):
            lab.link_down(second.hosts[0])
        bystander = lab.hosts[0].start(["sleep", "1000"])
    assert bystander.poll() is None
    assert has_rate(*lab.hosts[:2], PAYLOAD * 100)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda _: Lab(0), "got 0"),
        (lambda lab: lab.link_down(lab.hosts[0]), "no links"),
        (lambda lab: lab.hosts[1].start(["no-such"]), "'no-such' to start in host 1"),
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


def test_a_port_holds_as_much_as_it_is_said_to(namespaces):
    with Lab(hosts=2, mbit=100, port_bytes=32 << 10) as bounded:
        one, other = bounded.hosts
        bridge = f"{one.name.rpartition('-')[0]}-bridge"
        before = dropped(bridge)
        assert before == [0, 0], "the ports of both hosts"
        # TCP fills what there is, unless processors are too busy for it.
        eventually(lambda: megabits(one, other, 3_000_000) < 100 and dropped(bridge)[1] > 0)
    with pytest.raises(ValueError, match="a short way"):
        Lab(hosts=2, mbit=1, port_bytes=1, round_trip_ms=10)


def dropped(bridge):
    """Return how many packets each port of a lab's bridge had no room for."""
    show = ["tc", "-n", bridge, "-s", "qdisc", "show"]
    said = subprocess.run(show, stdout=PIPE, text=True, check=True).stdout
    assert said.count("qdisc tbf") == 2
    return [
        int(part.split(",")[0])
        for part in said.split("qdisc tbf")[1:]
        for part in part.split("dropped ")[1:2]
    ]
