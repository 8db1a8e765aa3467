"""Far connections that break go on over others, from the byte that was read last."""

import logging
import os
import random
import shutil
import subprocess
import time

import pytest

from reducer.commands.keygen import keygen
from tests.conftest import joined, local_pool
from tests.faults.steps import begin, exact, exact_or_typed

CAN_BREAK = os.geteuid() == 0 and shutil.which("ss")
SIZES = (100, 10_000, 200_000, 1_000_000)


@pytest.fixture(autouse=True)
def far(monkeypatch):
    """Have every round trip be a long one."""
    monkeypatch.setattr("worker_client.protocol.joining.FAR_S", 0.0)


def break_all(servers, end):
    """Have the kernel reset all connections to reducers, at one end; return how many."""
    ports = " or ".join(f"{end} = :{server.rpartition(':')[2]}" for server in servers)
    command = ["ss", "-H", "-K", "-t", "state", "established", f"( {ports} )"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.count("\n")


@pytest.mark.skipif(
    not CAN_BREAK, reason="needs root and `ss`, which break connections: make test-tools"
)
@pytest.mark.parametrize(
    "way_there", [(1, 1, False), (1, 1, True), (2, 3, False)], ids=["one", "with keys", "streams"]
)
def test_breaking_every_connection_costs_no_call(way_there, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "worker_client.runtime.transport")
    reducers, streams, keyed = way_there
    monkeypatch.setenv("REDUCTION_STREAMS", str(streams))
    arguments = {}
    if keyed:
        keygen(tmp_path / "keys", ["one"])
        monkeypatch.setenv("REDUCTION_KEYS", str(tmp_path / "keys" / "pool"))
        arguments = {"keys": tmp_path / "keys" / "jobs" / "one", "job": "one"}
    rng = random.Random(1)
    broken = 0
    with (
        local_pool(reducers) as servers,
        joined(2, servers=servers, timeout="20s", **arguments) as clients,
    ):
        exact(begin(clients, 0))
        for number in range(1, 21):
            step = begin(clients, number, rng.choice(SIZES))
            time.sleep(rng.random() / 200)
            broken += break_all(servers, rng.choice(["sport", "dport"]))
            exact(step)
            exact(begin(clients, number + 100))
        assert [client.counters.losses for client in clients] == [0, 0]
    assert broken > 20 * reducers
    resumed = [text for text in caplog.messages if "goes on over another one" in text]
    assert len(resumed) == broken


def test_whatever_a_proxy_loses_no_sum_is_wrong(pool, make_net):
    rng = random.Random(1)
    clients, proxies = make_net(pool, timeout="3s")
    for number in range(1, 31):
        for proxy in rng.choices(proxies, k=2):
            proxy.shoot(rng.choice(["up", "down"]), "cut", rng.randrange(300_000))
        exact_or_typed(begin(clients, number, rng.choice(SIZES)), 10.0)
