"""Fixtures that several layers use: real pools, and jobs of real clients in this process."""

import errno
import os
import signal
import socket
import subprocess
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from queue import Queue
from types import SimpleNamespace

import pytest
from hypothesis import settings

import reducer
from reducer import reference
from reducer.config import load
from reducer.server import Server
from tests.ranks import SETTINGS, Forked
from tests.verdicts import (  # noqa: F401 (hooks)
    pytest_make_collect_report,
    pytest_runtest_makereport,
    pytest_terminal_summary,
)
from worker_client.client.bootstrap import connect

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

# What launchers, and whoever configures this project, tell a process.
PREFIXES = ("REDUCTION_", "TORCHELASTIC_", "OMPI_", "PMI", "MPI_", "SLURM_", "PET_", "AZ")
NAMES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT", "CLUSTER_SPEC", "TF_CONFIG", "JOB_COMPLETION_INDEX"),
}

# Labs have numbers that the machine has once, and some of these tests count them.
LABS = (
    "tests/bench/test_allreduce.py",
    "tests/lab/",
    "tests/launch/test_doctor.py",
    "tests/launch/test_vertex.py",
    "tests/torture/",
)

# Files that take longest begin, so that no process is left alone with one of them at the end.
LONGEST = (
    *LABS,
    *(f"tests/integration/test_{name}.py" for name in ("demo", "ddp", "horovod", "faults")),
    "tests/faults/test_failpoints.py",
    "tests/worker_client/test_driver_signals.py",
    *(f"tests/integration/test_{name}.py" for name in ("readme", "failures", "rank_loss")),
    "tests/launch/test_launchers.py",
    *(f"tests/integration/test_{name}.py" for name in ("bits", "wire_dtype")),
    "tests/sim/",
)


# Started by `nohup` or in a shell's background, this ignores what some children are to die of, and
# so would they.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Keep each file's tests in one process of `pytest -n`, and in one all that make labs."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 (only with `-n`)

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "labs" if nodeid.startswith(LABS) else super()._split_scope(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks
def pytest_collection_modifyitems(config, items):
    """Mark the extended cases, and begin with the files that take longest."""
    part = config.getoption("lf", False) or any("::" in argument for argument in config.args)
    mark_cases(items, whole=not part)
    if not part:  # files are here as a whole
        check_fast(items)
    items.sort(key=lambda item: [item.nodeid.startswith(file) for file in LONGEST], reverse=True)


def mark_cases(items, whole):
    """Mark the cases that a test leaves to `make test-extended`; the others stand for them."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("extended_cases"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for test, cases in tests.items():
        begins = cases[0].get_closest_marker("extended_cases").args
        for item in cases:
            if item.callspec.id.startswith(begins):
                item.add_marker(pytest.mark.extended)
        ids = [item.callspec.id for item in cases]
        gone = [one for one in begins if not any(each.startswith(one) for each in ids)]
        if whole and (gone or all(item.get_closest_marker("extended") for item in cases)):
            raise pytest.UsageError(f"{test}: no case begins with {gone}, or no other is left")


def check_fast(items):
    """Refuse extended tests whose fast ones are gone, or extended themselves."""
    fast = [item.nodeid for item in items if not item.get_closest_marker("extended")]
    files = {item.nodeid.partition("::")[0] for item in items}
    marked = ((item, mark) for item in items for mark in item.iter_markers("extended"))
    for item, name in ((item, name) for item, mark in marked for name in mark.args):
        begins = name if "/" in name else f"{item.nodeid.partition('::')[0]}::{name}"
        here = begins.partition("::")[0] in files  # of a folder, some alone may be
        if here and not any(nodeid.startswith(begins) for nodeid in fast):
            raise pytest.UsageError(f"{item.nodeid}: there is no fast test {begins}")


@contextmanager
def local_pool(number, failpoints="", **options):
    """`reducer.local_pool` of forks, with failpoints if told: they start in a third of the time."""

    def fork(command, *, text, **streams):
        assert text
        command = command[1:]
        if failpoints:
            command = ["-m", "torture.failpoints", failpoints, *command[1:]]
        return Forked(command, {**os.environ, **SETTINGS}, **streams)

    forks = SimpleNamespace(
        Popen=fork, PIPE=subprocess.PIPE, TimeoutExpired=subprocess.TimeoutExpired
    )
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("reducer.pool.subprocess", forks)
            servers = stack.enter_context(reducer.local_pool(number, **options))
        yield servers


@contextmanager
def reducer_here(keys=None, **settings):
    """A reducer in this process, with an address of its own unless it is told one."""
    server = Server(load(**{"bind": "tcp://127.0.0.1:0", **settings}), keys)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def reference_here(stop=None):
    """A reference reducer in a thread."""
    stop, told = stop or threading.Event(), Queue()
    thread = threading.Thread(target=reference.serve, args=("tcp://127.0.0.1:0", stop, told.put))
    thread.start()
    try:
        yield told.get(timeout=20)
    finally:
        stop.set()
        thread.join()


@contextmanager
def joined(world_size, **arguments):
    """All ranks of one job as clients in this process, each with its own thread and sockets."""
    arguments.setdefault("job", "a job")
    with ExitStack() as stack, ThreadPoolExecutor(world_size) as pool:

        def join(rank):  # one that gets in leaves again, whatever others do
            return stack.enter_context(connect(rank=rank, world_size=world_size, **arguments))

        joined = list(pool.map(join, range(world_size)))
        assert {client.impl for client in joined} == {os.environ.get("REDUCTION_IMPL", "compiled")}
        yield joined


@pytest.fixture(autouse=True, scope="module")
def _no_client_is_left():
    """Find clients that were never shut down: they would meet the reducers of other tests."""
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "worker-client"]
    for thread in left:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in left)


@pytest.fixture
def no_settings(monkeypatch):
    """Hide what the environment says, perhaps because a launcher started these tests."""
    for name in list(os.environ):
        if name.upper().startswith(PREFIXES) or name in NAMES:
            monkeypatch.delenv(name)


@pytest.fixture
def without_ipv6(monkeypatch):
    """Have this system make no sockets of IPv6, as Linux does with ``ipv6.disable=1``."""
    make = socket.socket

    def refuse(family=socket.AF_INET, *arguments, **named):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return make(family, *arguments, **named)

    monkeypatch.setattr(socket, "socket", refuse)


@pytest.fixture
def broken_pipes():
    """The SIGPIPEs that have come: at its default action the first one ends a process."""
    come = []
    before = signal.signal(signal.SIGPIPE, lambda number, _: come.append(number))
    yield come
    signal.signal(signal.SIGPIPE, before)


@pytest.fixture(scope="module")
def pool():
    """Two real reducer processes."""
    with local_pool(2) as addresses:
        yield addresses


@pytest.fixture
def servers(pool):
    """The pool, as `connect` calls it."""
    return pool


@pytest.fixture
def job(pool, request):
    """Make jobs of real clients that share the module's pool."""
    with ExitStack() as stack:

        def make(world_size, **arguments):
            arguments = {"servers": pool, "job": request.node.name[:100], **arguments}
            return stack.enter_context(joined(world_size, **arguments))

        yield make
