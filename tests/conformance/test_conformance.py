"""The conformance kit passes what keeps to the specification, and fails what does not."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from reducer import config, reference
from reducer.conformance import client_cases, transcript
from reducer.conformance.cases import attempt
from reducer.errors import ConfigError
from reducer.wire.constants import ReduceOp
from reducer.wire.leaves import Share
from tests.commands import free_ports, run_here, serving
from tests.conformance import mutations
from tests.conftest import joined, reducer_here, reference_here
from tests.integration.test_leaves import leaves_of, subtree_sums
from tests.kernels.test_leaves import root
from worker_client.client.bootstrap import connect
from worker_client.commands import conform
from worker_client.reference import Client

ROOT = Path(__file__).parents[2]
STRANGER = ROOT / "examples/stranger.py"
RANK = Path(__file__).with_name("rank.py")


@contextmanager
def compiled_here(**settings):
    with reducer_here(**settings) as server:
        yield server.address


REDUCERS = {"compiled": compiled_here, "reference": reference_here}


@pytest.mark.parametrize("which", REDUCERS)
def test_the_kit_passes_a_reducer(which):
    with REDUCERS[which]() as address:
        done = run_here(f"reducer conform {address}")
    failed = [line for line in done.stdout.splitlines() if not line.startswith("ok")]
    assert (done.returncode, failed[:-1]) == (0, []), "\n".join(failed)


def test_a_stranger_has_time_to_hear_why_it_is_dropped_by_a_reducer_that_stood_still():
    reducer = reference.Reducer()
    reducer.tick(1.0)
    reducer.receive(b"stranger", [b"\0" * 96], 50.0)
    assert [peer for peer, _ in reducer.out] == [b"stranger"]
    assert reducer.ending == {b"stranger": 51.0}


@pytest.mark.parametrize(
    ("address", "code", "said"),
    [
        ("127.0.0.1:{port}", 1, "nothing listens at 127.0.0.1:{port}: start a reducer"),
        ("localhost", 2, "the reducer's address: write it as HOST:PORT"),
    ],
)
def test_an_address_without_a_reducer_is_told_once(address, code, said):
    (port,) = free_ports(1)
    done = run_here(f"reducer conform {address.format(port=port)}")
    assert (done.returncode, done.stdout) == (code, "")
    assert " ".join(done.stderr.split()).startswith(f"reducer: {said.format(port=port)}")


@pytest.mark.parametrize("bug", mutations.REDUCERS)
def test_the_kit_fails_a_reducer_with_a_bug(bug, monkeypatch):
    name, planted, what = mutations.REDUCERS[bug]
    monkeypatch.setattr(reference, name, planted)
    (case,) = (case for case in transcript.cases() if case.what.startswith(what))
    with reference_here() as address:
        assert attempt(case, address).problem


def conforms(*command, scenarios=client_cases.SCENARIOS, monkeypatch=None):
    """Return the lines of the cases that fail, with a client that a command starts."""
    said = []
    if monkeypatch is not None:
        monkeypatch.setattr(client_cases, "SCENARIOS", scenarios)
    passed = conform.conform(
        [sys.executable, *map(str, command)], ranks=2, quiet=True, say=said.append
    )
    failed = [line for line in said[:-1] if not line.startswith("ok")]
    assert passed == (not failed)
    return failed


def test_the_kit_passes_the_stranger():
    assert conforms(STRANGER) == []


@pytest.mark.extended("test_the_kit_passes_the_stranger")
@pytest.mark.parametrize("which", ["ours", "reference"])
def test_the_kit_passes_a_client(which, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    assert conforms(RANK, which) == []


@pytest.mark.parametrize("bug", mutations.CLIENTS)
def test_the_kit_fails_a_client_with_a_bug(bug, tmp_path, monkeypatch):
    words, planted, what = mutations.CLIENTS[bug]
    source = STRANGER.read_text()
    assert words in source
    (tmp_path / "stranger.py").write_text(source.replace(words, planted))
    some = tuple(
        scenario
        for scenario in client_cases.SCENARIOS
        if any(what in f"{scenario.goal}: {said}" for _, said, _ in scenario.checks)
    )
    failed = conforms(tmp_path / "stranger.py", scenarios=some, monkeypatch=monkeypatch)
    assert any(what in line for line in failed), failed


def two_threads_here():
    return compiled_here(threads=2)


@pytest.mark.parametrize("here", [compiled_here, two_threads_here, reference_here])
def test_three_implementations_are_ranks_of_one_job(here):
    with here() as address:
        told = {"WORLD_SIZE": "3", "REDUCTION_SERVERS": address, "REDUCTION_JOB": "three"}
        told |= {"REDUCTION_CHUNK_BYTES": "65536", "PYTHONPATH": str(ROOT)}
        programs = [(STRANGER,), (RANK, "ours"), (RANK, "reference")]
        ranks = [
            subprocess.Popen(
                [sys.executable, *program], env={**os.environ, **told, "RANK": str(at)}
            )
            for at, program in enumerate(programs)
        ]
        try:
            assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
        finally:
            for rank in ranks:
                rank.kill()


def test_a_reference_and_a_client_go_on_together_without_a_reducer():
    """The map, heirs, claims and the ranks' question are understood alike by both."""
    ends, failed = threading.Event(), []

    def calls(rank, all_reduce):
        for call in range(14):
            array = np.arange((1000, 300_000, 20_000)[call % 3], dtype=np.float32) % 97
            mine = array * (rank + 1)
            all_reduce(mine)
            failed.extend([call] * (not (mine == array * 3).all()))
            if call == 4:
                ends.set()
            time.sleep(0.05)

    def by_the_reference(servers):
        client = Client(servers, "map", 0, 2, timeout_s=30)
        calls(0, client.all_reduce)
        client.close()

    with ExitStack() as stack:
        here = (reference_here(), reference_here(ends), compiled_here())
        servers = [stack.enter_context(one) for one in here]
        rank = threading.Thread(target=by_the_reference, args=(servers,))
        rank.start()
        stack.callback(rank.join)
        with connect(rank=1, world_size=2, servers=",".join(servers), job="map") as client:
            calls(1, lambda array: client.all_reduce(array, op="sum").wait(30))
            assert (failed, client.losses) == ([], 1)


@pytest.mark.parametrize("which", REDUCERS)
def test_a_reference_and_a_client_sum_leaves_together(which):
    cases = [
        (leaves, size, dtype, op)
        for leaves, size in ((3, 5), (8, 40_000), (13, 300_000), (7, 0))
        for dtype, op in ((np.float32, "sum"), (np.float16, "mean"))
    ]
    inputs = [
        [(leaf * 1e-4).astype(dtype) for leaf in leaves_of(count, size)]
        for count, size, dtype, _ in cases
    ]
    wrong = []

    def check(case, result):
        expected = root(inputs[case], ReduceOp[cases[case][-1].upper()])
        wrong.extend([cases[case]] * (result.tobytes() != expected.tobytes()))

    def by_the_reference(address):
        client = Client([address], "leaves", 0, 2, timeout_s=30)
        for case, (count, *_, op) in enumerate(cases):
            given = subtree_sums(inputs[case], Share(count, (0, 1), 0))
            client.reduce_leaves(given, count, op)
            check(case, given[0])
        client.close()

    with ExitStack() as stack:
        address = stack.enter_context(REDUCERS[which]())
        rank = threading.Thread(target=by_the_reference, args=(address,))
        rank.start()
        stack.callback(rank.join)
        with connect(rank=1, world_size=2, servers=address, job="leaves") as client:
            for case, (count, *_, op) in enumerate(cases):
                share = client.leaves(count)
                given = subtree_sums(inputs[case], share)
                client.reduce_leaves(given, share, op).wait(30)
                check(case, given[0])
            rank.join(30)
    assert wrong == []


def test_the_command_starts_the_reference():
    """What it says first is its address; ranks of ours use it, and SIGTERM ends it."""
    with serving("--impl", "plain", stderr=subprocess.PIPE) as (process, address, _):
        with joined(2, servers=[address], job="plain") as clients:
            works = [client.all_reduce(np.full(1000, 2.0), "sum") for client in clients]
            assert all((work.wait(20) == 4.0).all() for work in works)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "the reference reducer: one job, for loopback and private networks" in said


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"threads": 2}, "threads"),
        ({"http": "9090"}, "http"),
        ({"keys": "/etc/keys"}, "keys"),
        ({"max_jobs": 3}, "max_jobs"),
        ({"kernel": "generic"}, "kernel"),
        ({"bind": "tcp://0.0.0.0:0", "insecure": True}, "bind"),
    ],
)
def test_the_reference_refuses_what_it_cannot_do(settings, named):
    with pytest.raises(ConfigError, match=f"^{named}: the reference reducer"):
        config.load(impl="plain", **settings).check_for_reference()
    config.load(impl="plain", kernel="numpy", io_threads=2).check_for_reference()


@pytest.mark.parametrize(
    ("settings", "why"), [({"impl": "plain"}, "impl: plain is"), ({"kernel": "numpy"}, "kernel: ")]
)
def test_no_other_reducer_is_it(settings, why):
    with pytest.raises(ConfigError, match=why), reducer_here(**settings):
        pass
