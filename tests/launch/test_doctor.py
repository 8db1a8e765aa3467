"""`worker-client doctor` beside real reducers, each ill in a way of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from reducer.commands.keygen import keygen
from reducer.errors import ReducerLostError
from tests.commands import run_command, serving
from tests.launch.conftest import bare_environment
from tests.launch.environments import spec
from worker_client.client.interfaces import addresses
from worker_client.commands.demo.ranks import free_port
from worker_client.commands.doctor import examine
from worker_client.commands.doctor.findings import Health, Kind, compare
from worker_client.commands.doctor.host import examine_host
from worker_client.launch import resolve

DOCTOR = [sys.executable, "-c", "from worker_client.cli import main; main()", "doctor"]
OLDER = (
    "import reducer.wire.header as header; header.VERSION_MAJOR, header.VERSION = 9, '9.0';"
    "from reducer.cli import main; main()"
)


def reducer(*options, **how):
    """A real reducer on loopback."""
    return serving("--log-level", "error", *options, env=bare_environment(), **how)


def ask(*options, **settings):
    """Return the doctor's exit code, and what it says."""
    done = run_command(*DOCTOR, *options, env=bare_environment(**settings))
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout


def facts(servers, **settings):
    """Return what it says to programs."""
    code, said = ask("--json", REDUCTION_SERVERS=",".join(servers), **settings)
    found = json.loads(said)
    assert code == (1 if found["problems"] else 0)
    return found


def test_each_illness_is_named():
    with ExitStack() as stack:
        _, well, _ = stack.enter_context(reducer("--threads", 2))
        process, dead, _ = stack.enter_context(reducer())
        process.kill()
        process.wait()
        process, hung, _ = stack.enter_context(reducer())
        process.send_signal(signal.SIGSTOP)
        stack.callback(process.send_signal, signal.SIGCONT)
        _, older, _ = stack.enter_context(reducer(command=[sys.executable, "-c", OLDER]))
        keyed = stack.enter_context(server_with_keys())
        text = stack.enter_context(server_of_text())
        unknown = "no-such-host.invalid:5555"
        found = facts([well, dead, hung, older, keyed, text, unknown])
    assert {one["address"]: one["kind"] for one in found["problems"]} == {
        dead: Kind.DEAD,
        hung: Kind.SILENT,
        older: Kind.VERSION,
        keyed: Kind.KEYS,
        text: Kind.PORT,
        unknown: Kind.NAME,
    }
    says = {one["address"]: one["message"] + ": " + one["advice"] for one in found["problems"]}
    assert f"port {dead.rpartition(':')[2]}" in says[dead]
    assert "1.0" in says[older]
    assert "9" in says[older]
    assert "REDUCTION_KEYS" in says[keyed]
    assert "is no reducer" in says[text]
    assert "'no-such-host.invalid'" in says[unknown]
    [healthy, *others] = found["reducers"]
    assert healthy["lanes"] == 2
    assert healthy["resolved"] == ["127.0.0.1"]
    assert 0 < healthy["round_trip_s"] < 60
    assert healthy["bytes_per_s"] > 0
    assert all(one["bytes_per_s"] is None for one in others)


@contextmanager
def server_with_keys():
    """A socket of ZeroMQ that demands keys."""
    context = zmq.Context()
    held = context.socket(zmq.ROUTER)
    held.curve_secretkey = zmq.curve_keypair()[1]
    held.curve_server = True
    try:
        yield f"127.0.0.1:{held.bind_to_random_port('tcp://127.0.0.1')}"
    finally:
        context.destroy(linger=0)


@contextmanager
def server_of_text():
    """A web server, as the one that a reducer itself may have at another port."""
    command = [sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout
        try:
            port = process.stdout.readline().split(" port ")[1].split()[0]
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def test_a_reducer_at_another_port_is_found_and_a_listed_one_is_not_taken_for_it():
    wrong = str(free_port())
    with reducer() as (_, there, _):
        right = there.rpartition(":")[2]
        # The same machine by two names: the port that is right for one is tried for the other.
        [problem] = facts([there, f"localhost:{wrong}"])["problems"]
        assert (problem["kind"], problem["address"]) == (Kind.PORT, f"localhost:{wrong}")
        assert f"localhost:{right}" in problem["advice"]
        [problem] = facts([there, f"127.0.0.1:{wrong}"])["problems"]
        assert problem["kind"] == Kind.DEAD


def test_a_host_that_drops_packets_is_named():
    with socket.socket() as full:  # a queue of connections that nobody takes, and that is full
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        with ExitStack() as stack:
            for _ in range(2):
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(full.getsockname())
            [problem] = facts([f"127.0.0.1:{full.getsockname()[1]}"])["problems"]
    assert problem["kind"] == Kind.HOST
    assert "firewall" in problem["advice"]


@pytest.mark.extended("test_each_illness_is_named")
def test_each_illness_of_keys_is_named(tmp_path):
    for pool in ("ours", "theirs"):
        keygen(tmp_path / pool, ["digits"])

    def problems(server, pool):
        keys = {"REDUCTION_KEYS": str(tmp_path / pool / "jobs" / "digits")} if pool else {}
        return facts([server], **keys)["problems"]

    with (
        reducer("--keys", tmp_path / "ours" / "pool") as (_, locked, _),
        reducer() as (_, unlocked, _),
    ):
        assert not problems(locked, "ours")
        found = [problems(locked, None), problems(locked, "theirs"), problems(unlocked, "ours")]
        allowed = tmp_path / "ours" / "pool" / "allowed"
        allowed.with_suffix(".new").write_text("# nobody\n")
        allowed.with_suffix(".new").replace(allowed)
        while not (revoked := problems(locked, "ours")):
            pass  # the list is read again within a second
        found.append(revoked)
    assert [one["kind"] for [one] in found] == [Kind.KEYS] * 4
    words = ("this worker has none", "is not of the pool", "has no keys", "the pool's allow-list")
    for [one], said in zip(found, words, strict=True):
        assert said in one["message"]


def test_one_that_never_answers_a_hello_is_named():
    def connect(address):
        raise ReducerLostError("it does not answer a HELLO", reducer=address)

    with reducer() as (_, there, _):
        found = examine.examine(there, connect, [there])
    assert found.problem
    assert found.problem.kind == Kind.SILENT


def test_what_is_said_to_people():
    wrong = f"127.0.0.1:{free_port()}"
    with reducer() as (_, there, _):
        code, said = ask(REDUCTION_SERVERS=f"{there},{wrong}", REDUCTION_JOB="mine")
        assert code == 1
        assert f"reducer {there}" in said
        assert " well: round trip " in said
        assert f"reducer {wrong}" in said
        assert "what to do: the reducer has ended or was never started" in said
        assert "1 of 2 reducers are well" in said
        assert "(REDUCTION_JOB)" in said
        code, said = ask(REDUCTION_SERVERS=there)
    assert code == 0
    assert "1 of 1 reducers are well" in said


def test_without_reducers_there_is_nothing_to_examine():
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


def outside():
    """Return the addresses of this machine's interfaces to others."""
    there = {name: its for name, its in addresses().items() if name != "lo"}
    if not there:
        pytest.skip("this machine has no network")
    return there


def test_the_interface_is_the_one_that_leads_to_the_job(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "127.0.1.1")
    for interface, its in outside().items():
        (found,) = examine_host(resolve({**NODES, "MASTER_ADDR": its[-1]}), [], told=False)
        assert f"GLOO_SOCKET_IFNAME={interface} " in found.advice


def test_a_host_whose_name_is_an_address_of_its_own_is_well(monkeypatch):
    for its in outside().values():
        monkeypatch.setattr(socket, "gethostname", lambda its=its: its[-1])
        assert not list(examine_host(resolve(NODES), [], told=False))


def test_a_host_whose_name_is_an_ipv6_address_may_have_no_ipv6(monkeypatch, without_ipv6):
    monkeypatch.setattr(socket, "gethostname", lambda: "::1")
    (found,) = examine_host(resolve({**NODES, "MASTER_ADDR": "::1"}), ["::1"], told=False)
    assert "::1, the name of this host, is no name of an address here" in found.message


def test_rank_0_on_a_host_without_an_address_is_named():
    code, said = ask("--json", MASTER_ADDR="no..name", RANK="1", WORLD_SIZE="2")
    assert code == 1
    (problem,) = [one for one in json.loads(said)["problems"] if one["kind"] == Kind.NAME]
    assert problem["message"] == "the name of rank 0's host, 'no..name', does not resolve"
    assert "MASTER_ADDR" in problem["advice"]


def test_settings_that_are_wrong_are_said():
    assert ask(REDUCTION_SERVER="a:1")[0] == 1
    code, said = ask("--json", TF_CONFIG=spec({"worker": ["a"]}, "worker", 0))
    [problem] = json.loads(said)["problems"]
    assert (code, problem["kind"]) == (1, "settings")
    assert problem["message"].startswith("TF_CONFIG cluster.worker: write host:port (got 'a')")


def test_a_directory_without_keys_is_said_once(tmp_path):
    settings = {"REDUCTION_SERVERS": "10.0.0.5:5555,10.0.0.6:5555", "REDUCTION_KEYS": str(tmp_path)}
    code, said = ask(**settings)
    assert (code, said.count(f"there is no job.name in {tmp_path} (REDUCTION_KEYS")) == (1, 1)
    assert said.startswith("settings: ")
    assert "refused" not in said
    code, said = ask("--json", **settings)
    [problem] = json.loads(said)["problems"]
    assert (code, problem["kind"], problem["address"]) == (1, "settings", None)
    assert "REDUCTION_KEYS" in problem["message"]


def test_what_the_job_would_do_without_reducers_does_not_keep_the_doctor_away():
    with reducer() as (_, there, _):
        found = facts(
            [there],
            REDUCTION_FALLBACK="process-group",
            REDUCTION_ON_RANK_LOST="continue",
            REDUCTION_EMBEDDED="1",
            REDUCTION_JOB="j" * 100,
        )
    assert found["problems"] == []


@pytest.mark.parametrize(
    ("rates", "slow"),
    [
        ([100.0, 100.0, 10.0], [2]),
        ([100.0, 10.0], [1]),
        ([100.0, 60.0, 40.0], []),
        ([10.0, 10.0], []),
        ([10.0], []),
        ([100.0, None, 10.0], [2]),
        ([], []),
    ],
)
def test_a_slow_link_is_one_that_carries_far_less_than_the_others(rates, slow):
    found = compare([Health(f"r{at}:1", bytes_per_s=rate) for at, rate in enumerate(rates)])
    assert [at for at, one in enumerate(found) if one.problem] == slow
    assert all(one.problem.kind is Kind.SLOW for one in found if one.problem)


@pytest.mark.extended("test_a_slow_link_is_one")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for network namespaces")
def test_a_link_at_a_tenth_of_the_others_is_named(namespaces):
    from lab import Lab  # noqa: PLC0415 (needs nothing where it is skipped)

    with Lab(hosts=4, mbit=200) as lab:
        _, *pool = lab.hosts
        lab.set_rate(pool[1], 20)
        for host in pool:
            process = host.start(
                [sys.executable, "-m", "reducer", "serve", "--bind", f"tcp://{host.address}:5555"],
                env={**bare_environment(), "REDUCTION_INSECURE": "1"},
                stdout=subprocess.PIPE,
            )
            assert process.stdout
            assert process.stdout.readline().startswith("reducer ready")
        servers = ",".join(f"{host.name}:5555" for host in pool)
        asking = lab.hosts[0].start(
            [*DOCTOR, "--json"],
            env={**bare_environment(), "REDUCTION_SERVERS": servers},
            stdout=subprocess.PIPE,
        )
        said = json.loads(asking.communicate(timeout=100)[0])
    [problem] = said["problems"]
    assert (problem["address"], problem["kind"]) == (f"{pool[1].name}:5555", Kind.SLOW)
    rates = [one["bytes_per_s"] * 8 / 1e6 for one in said["reducers"]]
    assert rates[1] < 20
    assert min(rates[0], rates[2]) > 60
