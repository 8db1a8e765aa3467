"""`worker-client doctor` beside real reducers, each ill in a way of its own."""

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack, closing

import pytest

from harness import pool
from lab import Lab
from reducer.commands.keygen import keygen
from reducer.errors import ReducerLostError
from reducer.monitoring.http_port import HttpPort
from reducer.runtime.keyring import Keyring
from tests.commands import free_ports, run_here, serving
from tests.conftest import reducer_here
from tests.launch.conftest import bare_environment
from tests.launch.environments import spec
from worker_client.client.interfaces import addresses
from worker_client.commands.doctor import examine, host
from worker_client.commands.doctor.findings import Health, Kind, compare
from worker_client.commands.doctor.host import examine_host
from worker_client.launch import resolve

OLDER = (
    "import reducer.wire.header as header; header.VERSION_MAJOR, header.VERSION = 9, '9.0';"
    "from reducer.cli import main; main()"
)


@pytest.fixture
def well():
    """The address of a reducer that is well."""
    with reducer_here(threads=2) as server:
        yield server.address


@pytest.fixture
def nobody():
    """An address at which nothing listens."""
    return f"127.0.0.1:{free_ports(1)[0]}"


def ask(line="", **settings):
    """Return the doctor's exit code, and what it says."""
    done = run_here(f"worker-client doctor {line}", env=bare_environment(**settings))
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def problems(*servers, **settings):
    """Return the problems that it tells programs of."""
    if servers:
        settings["REDUCTION_SERVERS"] = ",".join(servers)
    code, said = ask("--json", **settings)
    found = json.loads(said)["problems"]
    assert code == (1 if found else 0)
    return found


def address_of(listening):
    host, port = listening.getsockname()
    return f"{host}:{port}"


def test_each_illness_is_named(well, nobody, tmp_path):
    keygen(tmp_path, ["digits"])
    with (
        # As a process that is stopped: its kernel alone answers.
        socket.create_server(("127.0.0.1", 0)) as hung,
        serving(command=[sys.executable, "-c", OLDER], env=bare_environment()) as (_, older, _),
        reducer_here(Keyring.load(tmp_path / "pool")) as keyed,
        closing(HttpPort("127.0.0.1:0")) as text,
        text.serving(keyed.observer),
        socket.socket() as full,  # a queue of connections that is full, as if packets were dropped
        ExitStack() as stack,
    ):
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(2):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        ill = {
            nobody: (Kind.DEAD, [f"port {nobody.rpartition(':')[2]}"]),
            address_of(hung): (Kind.HANGS, []),
            address_of(full): (Kind.HOST, ["firewall"]),
            older: (Kind.VERSION, ["1.0", "9"]),
            keyed.address: (Kind.KEYS, ["REDUCTION_KEYS"]),
            text.address: (Kind.PORT, ["is no reducer"]),
            "no-such-host.invalid:5555": (Kind.NAME, ["'no-such-host.invalid'"]),
        }
        code, said = ask("--json", REDUCTION_SERVERS=",".join([well, *ill]))
    found = json.loads(said)
    kinds = {one["address"]: one["kind"] for one in found["problems"]}
    assert (code, kinds) == (1, {address: kind for address, (kind, _) in ill.items()})
    for one in found["problems"]:
        for word in ill[one["address"]][1]:
            assert word in f"{one['message']}: {one['advice']}"
    healthy, *others = found["reducers"]
    assert (healthy["lanes"], healthy["resolved"]) == (2, ["127.0.0.1"])
    assert 0 < healthy["round_trip_s"] < 60
    assert healthy["bytes_per_s"] > 0
    assert all(one["bytes_per_s"] is None for one in others)


def test_a_reducer_at_another_port_is_found_and_a_listed_one_is_not_taken_for_it(well, nobody):
    right, wrong = (address.rpartition(":")[2] for address in (well, nobody))
    # The same machine by two names: the port that is right for one is tried for the other.
    [problem] = problems(well, f"localhost:{wrong}")
    assert (problem["kind"], problem["address"]) == (Kind.PORT, f"localhost:{wrong}")
    assert f"localhost:{right}" in problem["advice"]
    [problem] = problems(well, nobody)
    assert problem["kind"] == Kind.DEAD


def test_one_that_never_answers_a_hello_is_named(well):
    def connect(address):
        raise ReducerLostError("it does not answer a HELLO", reducer=address)

    found = examine.examine(well, connect, [well])
    assert found.problem.kind == Kind.HANGS


def test_what_is_said_to_people(well, nobody):
    code, said = ask(REDUCTION_SERVERS=f"{well},{nobody}", REDUCTION_JOB="mine")
    assert (code, f"reducer {well}" in said, f"reducer {nobody}" in said) == (1, True, True)
    assert " well: round trip " in said
    assert "what to do: the reducer has ended or was never started" in said
    assert "1 of 2 reducers are well" in said
    assert "(REDUCTION_JOB)" in said
    code, said = ask()
    assert (code, "every rank hosts one" in said) == (0, True)


NODES = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("name", ["127.0.1.1", "localhost", "no..name"])
def test_a_host_whose_own_name_others_cannot_reach_is_told_what_to_set(name, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    (found,) = examine_host(resolve(NODES), [], told=False)
    assert found.kind is Kind.GLOO
    assert found.certain
    assert name in found.message
    others = [interface for interface in addresses() if interface != "lo"]
    there = [f"GLOO_SOCKET_IFNAME={interface} " in found.advice for interface in others]
    assert any(there) or not others
    (found,) = examine_host(resolve({}), [], told=False)
    assert not found.certain  # nobody says that there are other hosts
    assert not list(examine_host(resolve(NODES), [], told=True))
    assert not list(examine_host(resolve({**NODES, "LOCAL_WORLD_SIZE": "4"}), [], told=False))


def test_a_host_whose_name_is_an_address_is_well_or_told_the_interface_to_the_job(monkeypatch):
    outside = {name: its[-1] for name, its in addresses().items() if name != "lo"}
    if not outside:
        pytest.skip("this machine has no network")
    for interface, its in outside.items():
        monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
        (found,) = examine_host(resolve({**NODES, "MASTER_ADDR": its}), [], told=False)
        assert f"GLOO_SOCKET_IFNAME={interface} " in found.advice
        monkeypatch.setattr(socket, "gethostname", lambda its=its: its)
        assert not list(examine_host(resolve(NODES), [], told=False))


@pytest.mark.parametrize(
    ("cards", "offered"),
    [
        ({"eth0": ["10.0.0.1"]}, "GLOO_SOCKET_IFNAME=eth0 "),
        (
            {"eth0": ["10.0.0.1"], "wlan0": ["10.1.0.1"]},
            "INTERFACE (one of eth0 (10.0.0.1), wlan0",
        ),
        ({}, "(one of none)"),
    ],
)
def test_no_interface_is_offered_that_other_hosts_cannot_reach(cards, offered, monkeypatch):
    """Where no route leads anywhere, as at rank 0's host in a network without a way out."""
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    monkeypatch.setattr(host, "addresses", lambda: {"lo": ["127.0.0.1", "::1"], **cards})
    monkeypatch.setattr(host, "towards", lambda _: None)
    (found,) = examine_host(resolve(NODES), [], told=False)
    assert offered in found.advice


def test_a_host_whose_name_is_an_ipv6_address_may_have_no_ipv6(monkeypatch, without_ipv6):
    monkeypatch.setattr(socket, "gethostname", lambda: "::1")
    (found,) = examine_host(resolve({**NODES, "MASTER_ADDR": "::1"}), ["::1"], told=False)
    assert "::1, the name of this host, is no name of an address here" in found.message


def test_settings_that_are_wrong_are_said():
    [problem] = problems(TF_CONFIG=spec({"worker": ["a"]}, "worker", 0))
    assert problem["kind"] == "settings"
    assert problem["message"].startswith("TF_CONFIG cluster.worker: write host:port (got 'a')")


def test_a_directory_without_keys_is_said_once(tmp_path):
    servers, keys = "10.0.0.5:5555,10.0.0.6:5555", {"REDUCTION_KEYS": str(tmp_path)}
    code, said = ask(REDUCTION_SERVERS=servers, **keys)
    assert (code, said.count(f"there is no job.name in {tmp_path} (REDUCTION_KEYS")) == (1, 1)
    assert said.startswith("settings: ")
    assert "refused" not in said
    [problem] = problems(servers, **keys)
    assert (problem["kind"], problem["address"]) == ("settings", None)
    assert "REDUCTION_KEYS" in problem["message"]


def test_what_the_job_would_do_without_reducers_does_not_keep_the_doctor_away(well):
    settings = {"FALLBACK": "process-group", "ON_RANK_LOST": "continue", "EMBEDDED": "1"}
    settings["JOB"] = "j" * 100
    assert problems(well, **{f"REDUCTION_{name}": value for name, value in settings.items()}) == []


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ([100.0, 100.0, 10.0], [2]),
        ([100.0, 60.0, 40.0], []),
        ([10.0], []),
        ([100.0, None, 10.0], [2]),
    ],
)
def test_a_slow_link_is_one_that_carries_far_less_than_the_others(rates, slow):
    found = compare([Health(f"r{at}:1", bytes_per_s=rate) for at, rate in enumerate(rates)])
    assert [at for at, one in enumerate(found) if one.problem] == slow
    assert all(one.problem.kind is Kind.SLOW for one in found if one.problem)


@pytest.mark.extended("test_a_slow_link_is_one")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for network namespaces")
def test_a_link_at_a_tenth_of_the_others_is_named(namespaces):
    with Lab(hosts=4, mbit=200) as lab:
        _, *hosts = lab.hosts
        lab.set_rate(hosts[1], 20)
        servers = [reducer.address for reducer in pool.start(hosts)]
        doctor = ["-c", "from worker_client.cli import main; main()", "doctor", "--json"]
        asking = lab.hosts[0].start(
            [sys.executable, *doctor],
            env=bare_environment(REDUCTION_SERVERS=",".join(servers)),
            stdout=subprocess.PIPE,
        )
        said = json.loads(asking.communicate(timeout=100)[0])
    [problem] = said["problems"]
    assert (problem["address"], problem["kind"]) == (servers[1], Kind.SLOW)
    rates = [one["bytes_per_s"] * 8 / 1e6 for one in said["reducers"]]
    assert rates[1] < 20
    assert min(rates[0], rates[2]) > 60
