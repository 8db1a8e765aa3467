"""What a run without a process group is called: runs that share a pool never meet by accident."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from torch.distributed import TCPStore

from reducer.errors import (
    ConfigError,
    MembershipError,
    MismatchError,
    RankLostError,
    StaleGenerationError,
)
from tests.conftest import joined, local_pool
from tests.integration.calls import all_reduce
from tests.ranks import SETTINGS, environments, ranks
from tests.waits import within_s
from worker_client.client.bootstrap import connect

PLACE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "RANK": "0"}
HELD = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
TASK = {"cluster": {"worker": ["localhost:1", "localhost:2"]}, "task": {"type": "worker"}}
NAMES = """
import subprocess, sys, worker_client
path, *others = sys.argv[1:]
for other in others:
    subprocess.run(["mount", "--bind", other, path], check=True)
    client = worker_client.init()
    print(client.spec.job, client.spec.run)
    client.shutdown()
"""


def tell(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    "told",
    [
        {"RANK": "0", "WORLD_SIZE": "2"},
        {**PLACE, **TWO, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "False"},
        {"TF_CONFIG": json.dumps(TASK)},
    ],
    ids=["no place", "torchrun that does not listen", "TF_CONFIG"],
)
def test_a_place_where_nobody_listens_is_no_name(no_settings, monkeypatch, told):
    """Rank 0 of one run and rank 1 of another could come first, and nothing would tell."""
    tell(monkeypatch, told)
    with pytest.raises(ConfigError, match="set REDUCTION_JOB=NAME"):
        connect(servers=("127.0.0.1:1",))


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


@pytest.mark.parametrize("answers", [True, False])
def test_a_store_whose_name_cannot_be_resolved_is_said(no_settings, monkeypatch, answers):
    asked = threading.Event()

    def resolve(*_, **__):
        asked.wait(0 if answers else 20)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    tell(monkeypatch, {**PLACE, **TWO, **HELD, "MASTER_ADDR": "node-0.pool"})
    why = "Temporary failure" if answers else "the name server does not answer"
    try:
        with pytest.raises(MembershipError, match=f"its name could not be resolved: {why}"):
            connect(servers=("127.0.0.1:1",), connect_timeout="0.3s")
    finally:
        asked.set()


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


NAMED = {**PLACE, **TWO, "REDUCTION_JOB": "train", "REDUCTION_GENERATION": "1"}
AT_A_TASK = {"TF_CONFIG": json.dumps(TASK), "REDUCTION_JOB": "train"}
ELSEWHERE = {
    "cluster": {"worker": ["localhost:3", "localhost:4"]},
    "task": {"type": "worker", "index": 1},
}


@pytest.mark.parametrize(
    ("told", "other"),
    [
        (NAMED, {"TORCHELASTIC_RESTART_COUNT": "1", "RANK": "1"}),
        (AT_A_TASK, {"TF_CONFIG": json.dumps(ELSEWHERE)}),
    ],
    ids=["another start", "other tasks"],
)
def test_runs_of_one_name_are_told_apart(no_settings, monkeypatch, told, other):
    tell(monkeypatch, told)
    with local_pool(1) as servers, connect(servers=servers):
        tell(monkeypatch, other)
        with pytest.raises(StaleGenerationError, match="another REDUCTION_JOB"):
            connect(servers=servers, connect_timeout="20s")


MOUNTS = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="mounts files: needs root"
)


@MOUNTS
@pytest.mark.parametrize("named", [{"TORCHELASTIC_RUN_ID": "100"}, {"REDUCTION_JOB": "train"}])
def test_clusters_whose_places_are_called_alike_do_not_meet(tmp_path, named):
    """Each has a machine of this name, where its torchrun listens at this port."""
    one = listen("127.0.0.1")
    two = listen("127.0.0.2", one.port)
    files = [tmp_path / "one", tmp_path / "two"]
    for cluster, file in zip((one, two), files, strict=True):
        file.write_text(f"{cluster.host} head\n")
    place = {"MASTER_ADDR": "head", "MASTER_PORT": str(one.port), "LOCAL_WORLD_SIZE": "1"}
    first, second = runs_beside("/etc/hosts", files, {**TWO, **HELD, **place, **named})
    assert first != second


@MOUNTS
def test_machines_made_from_one_image_do_not_meet(tmp_path):
    """They have the same names and the same numbers of namespaces, but boot for themselves."""
    files = [tmp_path / "one", tmp_path / "two"]
    for file in files:
        file.write_text(file.name)
    told = {**PLACE, **TWO, "REDUCTION_JOB": "train"}
    path = "/proc/sys/kernel/random/boot_id"
    first, second, again = runs_beside(path, [*files, files[0]], told)
    assert first == again != second


def runs_beside(path, others, told):
    """Join a job where other files are mounted at a path, and return its name and its run there."""
    with local_pool(1) as servers:
        done = subprocess.run(
            ["unshare", "--mount", sys.executable, "-c", NAMES, path, *others],
            env={**os.environ, **SETTINGS, "REDUCTION_SERVERS": servers[0], **told},
            capture_output=True,
            text=True,
            check=False,
        )
    if "mount" in done.stderr:
        pytest.skip("the kernel refuses mounts")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_job_of_one_needs_no_name(no_settings):
    with local_pool(1) as servers:
        for _ in range(2):
            with connect(rank=0, world_size=1, servers=servers) as client:
                assert client.all_reduce(np.ones(3), "sum").wait(5).tolist() == [1.0, 1.0, 1.0]


def test_the_process_of_an_earlier_run_is_not_met():
    """Its rank 0 was killed before its first call; its rank 1 has yet to call."""
    code = "import sys, worker_client; worker_client.init(); print(flush=True); sys.stdin.read()"
    with local_pool(2) as servers:
        (told, _) = environments(2, servers, REDUCTION_JOB="train")
        told = {name: text for name, text in told.items() if not name.startswith("MASTER_")}
        with (
            ranks([told], "-c", code, talk=True) as (killed,),
            connect(rank=1, world_size=2, servers=servers, job="train", timeout="5s") as old,
        ):
            killed.stdout.readline()
            killed.kill()
            killed.wait()
            with pytest.raises(StaleGenerationError, match="still has ranks 1 of another run"):
                connect(rank=0, world_size=2, servers=servers, job="train", connect_timeout="3s")
            with pytest.raises(RankLostError):
                old.all_reduce(np.ones(3), "sum").wait(5)
        with joined(2, servers=servers, job="train") as both:
            all_reduce(both)


@pytest.mark.extended_cases(
    "wire_dtype-values1",
    "fusion_threshold",
    "servers-values5",
)
@pytest.mark.parametrize(
    ("variable", "values", "said"),
    [
        ("wire_dtype", ("none", "bf16"), ("none", "bf16")),
        ("wire_dtype", ("int8", "bf16"), ("int8", "bf16")),
        ("chunk_bytes", ("256KiB", "64KiB"), ("262144", "65536")),
        ("fusion_threshold", ("2MiB", "1MiB"), ("2097152", "1048576")),
        ("servers", (slice(2), slice(1)), ("2", "1")),
        ("servers", (slice(2), slice(None, None, -1)), ("0", "1")),
    ],
)
def test_ranks_of_other_settings_learn_it_at_once(variable, values, said):
    with local_pool(2) as servers, ThreadPoolExecutor(2) as pool:

        def call(rank):
            value = values[rank]
            settings = {variable: servers[value] if variable == "servers" else value}
            common = {"world_size": 2, "servers": servers, "job": "settings"}
            with (  # noqa: PT012 (it comes when a rank joins, or with its first call)
                pytest.raises(MismatchError) as error,
                connect(rank=rank, **{**common, **settings}) as client,
            ):
                time.sleep(0.3)  # the other has tried by now
                client.all_reduce(np.ones(3), "sum").wait()
            return error.value

        begun = time.monotonic()
        for error in pool.map(call, range(2)):
            assert f"REDUCTION_{variable.upper()}" in str(error)
            assert all(f"says {value}" in str(error) for value in said)
            assert {error.rank, error.other_rank} == {0, 1}
            assert variable != "wire_dtype" or error.field == "REDUCTION_WIRE_DTYPE"
        within_s(5.0, begun)
