"""One job in many environments: it works, or what it needs is said.

The table in CONTRIBUTING.md has these environments, and what happens.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import NamedTuple
from urllib.request import urlopen

import numpy as np
import psutil
import pytest

from reducer.errors import CapacityError
from tests.commands import run_command, serving
from tests.conftest import joined, local_pool, reducer_here
from tests.integration.calls import all_reduce
from tests.ranks import ONE_THREAD, ROOT, environments, ranks
from tests.waits import eventually
from worker_client.client.bootstrap import connect

# One of two ranks, in the locale of its environment: whatever `-O` leaves out, this compares.
CALLS = """
import locale, sys
import numpy as np
import worker_client
locale.setlocale(locale.LC_ALL, "")
rank, server = int(sys.argv[1]), sys.argv[2]
client = worker_client.init(rank=rank, world_size=2, servers=server, job="environment")
for call in range(20):
    dtype = ("f4", "f8", "i4", "f2")[call % 4]
    draw = np.random.default_rng(call)
    both = [draw.normal(0, 1000, 1 + 5003 * call).astype(dtype) for _ in range(2)]
    exact = "f4" if dtype == "f2" else dtype
    right = (both[0].astype(exact) + both[1].astype(exact)).astype(dtype)
    if client.all_reduce(both[rank], op="sum").wait(20).tobytes() != right.tobytes():
        sys.exit(f"call {call} is wrong")
client.shutdown()
print("right")
"""


class Environment(NamedTuple):
    """Where a reducer and two ranks run.

    Attributes:
        python: options of the interpreters.
        variables: beside those of `PLAIN`, and instead of them; None: without it.
        first: what a shell does in the process first; a mount of its own is at "$SPACE".
        bind: where the reducer listens.
        reducer_says, rank_says: parts of what is written to standard error.
    """

    python: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = {}
    first: str = ":"
    bind: str = "tcp://127.0.0.1:0"
    reducer_says: tuple[str, ...] = ()
    rank_says: tuple[str, ...] = ()


PLAIN = {**ONE_THREAD, "PATH": os.environ["PATH"], "HOME": "/", "PYTHONPATH": str(ROOT)}
SMALL_DISK = (
    'mount -t tmpfs -o size=4k none "$SPACE" && ! head -c 9999 /dev/zero 2>/dev/null >"$SPACE/full"'
)
ENVIRONMENTS = {
    "ipv6": Environment(bind="tcp://[::1]:0"),
    "without asserts and docstrings": Environment(("-OO",)),
    "development mode, warnings are errors": Environment(("-X", "dev", "-W", "error")),
    "C locale, unknown time zone, no home, no path": Environment(
        ("-X", "utf8=0"), {"LC_ALL": "C", "TZ": "No/Such", "HOME": None, "PATH": None}
    ),
    "Turkish, half a day ahead": Environment(
        variables={"LC_ALL": "tr_TR.UTF-8", "TZ": "Pacific/Apia", "LOCPATH": "$SPACE"}
    ),
    "24 files": Environment(first="ulimit -n 24"),
    "64 files, further threads and streams": Environment(
        variables={"REDUCTION_THREADS": "3", "REDUCTION_STREAMS": "3"}, first="ulimit -n 64"
    ),
    "1 GB of address space": Environment(
        first="ulimit -v 1000000",
        reducer_says=("instead of --memory-limit", "RLIMIT_AS (ulimit -v) leaves"),
    ),
    "read-only root": Environment(first="mount -o remount,bind,ro /"),
    "full disk for dumps and timelines": Environment(
        variables={"REDUCTION_TIMELINE": "$SPACE", "REDUCTION_DUMP": "$SPACE"},
        first=SMALL_DISK,
        reducer_says=("the timeline", "ends here: No space left on device; mend that"),
        rank_says=("ends here: No space left on device; mend that", "(REDUCTION_DUMP)"),
    ),
}


def start(environment, space):
    """Return how to start Python in an environment: the command, and the variables."""
    variables = {**PLAIN, **environment.variables}
    if environment.variables.get("LOCPATH"):
        if shutil.which("localedef") is None:
            pytest.skip("needs localedef")
        made = run_command("localedef", "-i", "tr_TR", "-f", "UTF-8", space / "tr_TR.UTF-8")
        if made.returncode:
            pytest.skip("this machine has no sources of Turkish locales")
    unshare = ("unshare", "--mount") if "mount" in environment.first else ()
    if unshare and (shutil.which("unshare") is None or run_command(*unshare, "true").returncode):
        pytest.skip("needs root, for mounts of its own")
    shell = environment.first.replace("$SPACE", str(space))
    command = (*unshare, "/bin/sh", "-c", f'{shell} && exec "$@"', "sh", sys.executable)
    env = {name: text.replace("$SPACE", str(space)) for name, text in variables.items() if text}
    return (*command, *environment.python), env


def job_in(environment, space):
    """Run the job; return what the reducer and its ranks have written to standard error."""
    python, env = start(environment, space)
    log = space / "reducer.log"
    served = (*python, "-m", "reducer")
    with (
        log.open("w") as stderr,
        serving("--bind", environment.bind, command=served, env=env, stderr=stderr) as server,
    ):
        both = [
            Popen(
                [*python, "-c", CALLS, str(rank), server.address],
                env=env,
                stdout=PIPE,
                stderr=PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        said = [process.communicate(timeout=100) for process in both]
        assert [out for out, _ in said] == ["right\n"] * 2, said
        server.process.terminate()
        assert server.process.wait(20) == 0
    return log.read_text(), "".join(err for _, err in said)


@pytest.mark.extended_cases("ipv6", "Turkish", "64 files", "read-only root")
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_job_in(name, tmp_path):
    environment = ENVIRONMENTS[name]
    if "::1" in environment.bind and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    space = tmp_path / "space"
    space.mkdir()
    reducer_said, rank_said = job_in(environment, space)
    assert "Traceback" not in reducer_said + rank_said
    for part in environment.reducer_says:
        assert part in reducer_said
    for part in environment.rank_says:
        assert part in rank_said


@pytest.fixture
def cgroup():
    """A control group that may take 512 MiB of memory."""
    for file in ("memory/{}/memory.limit_in_bytes", "{}/memory.max"):
        limit = Path("/sys/fs/cgroup", file.format(f"environment-{os.getpid()}"))
        with suppress(OSError):
            limit.parent.mkdir()
            if limit.exists():
                limit.write_text(f"{512 << 20}")
                break
            limit.parent.rmdir()
    else:
        pytest.skip("no control group of memory can be made here")
    yield limit.parent
    eventually(lambda: removed(limit.parent))


def removed(group):
    """Whether a group is gone: its processes may end a little later."""
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.extended("tests/reducer/test_memory.py")
@pytest.mark.parametrize(("asked", "level"), [(None, "info"), ("8GiB", "warning")])
def test_a_reducer_gives_jobs_less_memory_than_its_container_has(cgroup, tmp_path, asked, level):
    """Otherwise the kernel would end it in the middle of its jobs."""
    environment = Environment(
        variables={"REDUCTION_MEMORY_LIMIT": asked},
        first=f"echo $$ >{cgroup}/cgroup.procs",
    )
    reducer_said, _ = job_in(environment, tmp_path)
    (line,) = (line for line in reducer_said.splitlines() if "instead of --memory-limit" in line)
    assert f"this container (cgroup) may take {512 << 20}" in line
    assert level in line


def test_what_there_is_of_memory_is_the_limit_of_jobs(tmp_path):
    python, env = start(Environment(first="ulimit -v 1000000"), tmp_path)
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        serving("--http", 0, command=(*python, "-m", "reducer"), env=env, stderr=stderr) as server,
    ):
        most = int(re.search(r"jobs may take (\d+) bytes", log.read_text())[1])
        with urlopen(f"http://{server.http}/status.json", timeout=10) as answer:
            assert json.load(answer)["memory"]["limit"] == most < 1000000 << 10
        given = {"rank": 0, "world_size": 2, "servers": server.address, "timeout": 20}
        with pytest.raises(CapacityError, match="its log says if its machine has less"):
            connect(**given, job="too large", window_bytes=most)
        with connect(**given, job="fits", window_bytes=most // 4):
            pass


CHILD = """
import os, numpy, worker_client
servers = os.environ["REDUCTION_SERVERS"]
client = worker_client.init(rank=0, world_size=1, servers=servers, job=f"child {os.getpid()}")
assert client.all_reduce(numpy.arange(9), op="sum").wait(20).tolist() == [*range(9)]
client.shutdown()
"""
PARENT = f"""
import multiprocessing, torch, worker_client
client = worker_client.init()
def all_reduce(tensor):
    assert client.all_reduce(tensor.clone(), op="sum").wait(20).equal(2 * tensor)
for how in ("fork", "spawn", "forkserver"):
    child = multiprocessing.get_context(how).Process(target=exec, args=({CHILD!r},))
    if client.rank == 0:
        child.start()
    all_reduce(torch.arange(1000.0))
    if client.rank == 0:
        child.join(60)
        assert child.exitcode == 0, how
    all_reduce(torch.arange(1000.0))
for batch in torch.utils.data.DataLoader(torch.arange(16.0), batch_size=4, num_workers=2):
    all_reduce(batch)
client.shutdown()
print("right")
"""


def test_children_of_every_kind_beside_a_client():
    """They have a client of their own, and their parent keeps its own; so do a loader's workers."""
    pytest.importorskip("torch", reason="needs torch")
    with local_pool(1) as servers, ranks(environments(2, servers), "-c", PARENT) as job:
        assert [out.splitlines()[-1] for out in job.outputs()] == ["right"] * 2


def test_129_ranks():
    with reducer_here() as server, joined(129, servers=[server.address]) as clients:
        all_reduce(clients)


@pytest.mark.extended("tests/engine/test_large.py")
def test_a_call_of_3_gib_has_more_than_31_bits_of_elements():
    if psutil.virtual_memory().available < 16 << 30:
        pytest.skip("needs 16 GiB of memory that nobody uses")
    period = np.arange(101, dtype=np.uint8)  # of no chunk, no shard and no page
    count = 3 << 30
    with local_pool(2) as servers, joined(2, servers=servers) as clients:
        both = [np.resize(period, count) for _ in clients]
        works = [client.all_reduce(one, "sum") for client, one in zip(clients, both, strict=True)]
        for result in [work.wait(120) for work in works]:  # 6 s with nothing beside them
            for at in range(0, count, 101 << 20):
                part = result[at : at + (101 << 20)]
                assert part.tobytes() == np.resize(2 * period, part.size).tobytes()
