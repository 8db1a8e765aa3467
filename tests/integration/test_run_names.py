"""What a run without a process group is called: runs that share a pool never meet by accident."""

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest
from torch.distributed import TCPStore

from reducer.errors import ConfigError, MembershipError, StaleGenerationError
from tests.conftest import joined, local_pool
from tests.ranks import SETTINGS
from worker_client.client.bootstrap import connect

PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}
HELD = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
TASK = {"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker"}}
NAME = "import worker_client; spec = worker_client.init().spec; print(spec.job, spec.run)"


def tell(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "told",
    [
        {**PLACE, **TWO},
        {**PLACE, **TWO, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"TF_CONFIG": json.dumps(TASK)},
    ],
    ids=["env", "torchrun that does not listen", "TF_CONFIG"],
)
def test_a_place_where_nobody_listens_is_no_name(no_settings, monkeypatch, told):
    """Rank 0 of one run and rank 1 of another could come first, and nothing would tell."""
    tell(monkeypatch, told)
    with local_pool(1) as servers, pytest.raises(ConfigError, match="set REDUCTION_JOB=NAME"):
        connect(servers=servers)


def listen(address, port=0):
    """Return a store as torchrun keeps one, which leaves the same port of other addresses alone."""
    listening = socket.create_server((address, port))
    port = listening.getsockname()[1]
    fd = listening.detach()
    return TCPStore(address, port, is_master=True, master_listen_fd=fd, wait_for_workers=False)


def test_the_store_that_torchrun_keeps_names_a_run(no_settings, monkeypatch):
    stores = [listen("127.0.0.1") for _ in range(2)]
    tell(monkeypatch, {**PLACE, **HELD, "MASTER_PORT": str(stores[0].port)})
    with local_pool(1) as servers, joined(2, servers=servers, job=None) as first:
        works = [client.all_reduce(np.ones(3), "sum") for client in first]
        assert [work.wait(5)[0] for work in works] == [2.0, 2.0]
        monkeypatch.setenv("MASTER_PORT", str(stores[1].port))
        with joined(2, servers=servers, job=None) as second:
            assert first[0].spec.job == first[1].spec.job != second[0].spec.job


def test_a_store_that_cannot_be_reached_is_said(no_settings, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    tell(monkeypatch, {**PLACE, **TWO, **HELD, "MASTER_PORT": str(port)})
    with pytest.raises(MembershipError, match=r"cannot be reached: .*refused.* set REDUCTION_JOB"):
        connect(servers=("127.0.0.1:1",))
    told = {"REDUCTION_JOB": "mine", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    tell(monkeypatch, told)
    with local_pool(1) as servers, connect(servers=servers) as client:
        assert client.all_reduce(np.ones(3), "sum").wait(5)[0] == 1.0


def test_a_listener_that_is_no_store_holds_nobody_up(no_settings, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        tell(monkeypatch, {**PLACE, **TWO, **HELD, "MASTER_PORT": str(port)})
        with pytest.raises(MembershipError, match="cannot be reached: no answer"):
            connect(servers=("127.0.0.1:1",), connect_timeout="0.3s")


def test_who_joins_under_torchrun_names_the_job(no_settings, monkeypatch):
    tell(monkeypatch, {**PLACE, **HELD, "REDUCTION_JOIN": "1"})
    with pytest.raises(ConfigError, match="set REDUCTION_JOB to one name"):
        connect(servers=("127.0.0.1:1",), on_rank_lost="continue")


@pytest.mark.parametrize("other", [{"MASTER_PORT": "2"}, {"TORCHELASTIC_RESTART_COUNT": "1"}])
def test_runs_of_one_name_are_told_apart(no_settings, monkeypatch, other):
    tell(monkeypatch, {**PLACE, **TWO, "REDUCTION_JOB": "train", "REDUCTION_GENERATION": "1"})
    with local_pool(1) as servers, connect(servers=servers):
        tell(monkeypatch, {**other, "RANK": "1"})
        with pytest.raises(StaleGenerationError, match="another REDUCTION_JOB"):
            connect(servers=servers, connect_timeout="1s")


def test_runs_of_one_name_at_different_tasks_are_told_apart(no_settings, monkeypatch):
    tell(monkeypatch, {"TF_CONFIG": json.dumps(TASK), "REDUCTION_JOB": "train"})
    with local_pool(1) as servers, connect(servers=servers):
        cluster = {"worker": ["localhost:3", "localhost:4"]}
        task = {"cluster": cluster, "task": {"type": "worker", "index": 1}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(task))
        with pytest.raises(StaleGenerationError, match="another REDUCTION_JOB"):
            connect(servers=servers, connect_timeout="1s")


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts files of /etc: needs root"
)
@pytest.mark.parametrize("named", [{"TORCHELASTIC_RUN_ID": "100"}, {"REDUCTION_JOB": "train"}])
def test_clusters_whose_places_are_called_alike_do_not_meet(tmp_path, named):
    """Each has a machine of this name, where its torchrun listens at this port."""
    one = listen("127.0.0.1")
    two = listen("127.0.0.2", one.port)
    runs = []
    with local_pool(1) as servers:
        place = {"MASTER_ADDR": "head", "MASTER_PORT": str(one.port), "LOCAL_WORLD_SIZE": "1"}
        told = {**TWO, **HELD, **place, **named, "REDUCTION_SERVERS": servers[0]}
        for cluster in (one, two):
            (tmp_path / "hosts").write_text(f"{cluster.host} head\n")
            runs.append(run_beside("/etc/hosts", tmp_path / "hosts", told))
    assert runs[0] != runs[1]


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a boot's number: needs root"
)
def test_machines_made_from_one_image_do_not_meet(tmp_path):
    """They have the same names and the same numbers of namespaces, but boot for themselves."""
    runs = {}
    with local_pool(1) as servers:
        told = {**PLACE, **TWO, "REDUCTION_JOB": "train", "REDUCTION_SERVERS": servers[0]}
        for machine in ("one", "two", "one"):
            (tmp_path / machine).write_text(machine)
            run = run_beside("/proc/sys/kernel/random/boot_id", tmp_path / machine, told)
            runs.setdefault(machine, set()).add(run)
    assert len(runs["one"]) == 1
    assert runs["one"] != runs["two"]


def run_beside(path, other, told):
    """Join a job where another file is mounted at a path, and return its name and its run."""
    script = 'mount --bind "$0" "$1" && shift && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, other, path, sys.executable, "-c", NAME]
    done = subprocess.run(
        command,
        env={**os.environ, **SETTINGS, **told},
        capture_output=True,
        text=True,
        check=False,
    )
    if "mount" in done.stderr:
        pytest.skip("the kernel refuses mounts")
    assert done.returncode == 0, done.stderr
    return done.stdout
