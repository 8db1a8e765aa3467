"""What a run without a process group is called: runs that share a pool never meet by accident."""

import json
import os
import shutil
import socket
import subprocess
import sys

import numpy as np
import pytest

from reducer.errors import ConfigError, StaleGenerationError
from tests.conftest import joined, local_pool
from tests.ranks import SETTINGS
from worker_client.client.bootstrap import connect

PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}
HELD = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
TASK = {"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker"}}
NAME = "import worker_client; print(worker_client.init().spec.job)"


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


def test_the_place_where_torchrun_listens_is_a_name(no_settings, monkeypatch):
    tell(monkeypatch, {**PLACE, **HELD})
    with local_pool(1) as servers, joined(2, servers=servers, job=None) as first:
        works = [client.all_reduce(np.ones(3), "sum") for client in first]
        assert [work.wait(5)[0] for work in works] == [2.0, 2.0]
        monkeypatch.setenv("MASTER_PORT", "29501")
        with joined(2, servers=servers, job=None) as second:
            assert first[0].spec.job == first[1].spec.job != second[0].spec.job


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
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts a boot's number: needs root"
)
@pytest.mark.parametrize("address", ["127.0.0.1", socket.gethostname()])
def test_machines_made_from_one_image_have_jobs_of_their_own(tmp_path, address):
    """They have the same names and the same numbers of namespaces, but boot for themselves."""
    script = 'mount --bind "$0" /proc/sys/kernel/random/boot_id && exec "$@"'
    named = {}
    with local_pool(1) as servers:
        told = {**PLACE, **TWO, **HELD, "MASTER_ADDR": address, "REDUCTION_SERVERS": servers[0]}
        for machine in ("one", "two", "one"):
            (tmp_path / machine).write_text(machine)
            command = ["unshare", "--mount", "sh", "-c", script, tmp_path / machine]
            done = subprocess.run(
                [*command, sys.executable, "-c", NAME],
                env={**os.environ, **SETTINGS, **told},
                capture_output=True,
                text=True,
                check=False,
            )
            if "mount" in done.stderr:
                pytest.skip("the kernel refuses mounts")
            assert done.returncode == 0, done.stderr
            named.setdefault(machine, set()).add(done.stdout)
    assert len(named["one"]) == 1
    assert named["one"] != named["two"]
