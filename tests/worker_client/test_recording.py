"""The latest calls of each rank: what the files tell, and what the doctor finds in them."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from reducer.errors import ConfigError, MismatchError, ReductionError, ReductionTimeout
from reducer.wire.messages import Straggler
from tests import inside
from tests.commands import run_command
from tests.conftest import joined, reducer_here
from tests.waits import eventually
from worker_client.client import recording
from worker_client.client.client import Client
from worker_client.commands.doctor.dumps import examine_dumps

pytestmark = pytest.mark.usefixtures("no_settings")

DOCTOR = (sys.executable, "-c", "from worker_client.cli import main; main()", "doctor")
SIZES = (1000, 2000, 300, 40, 5000, 60)


@pytest.fixture(scope="module")
def server():
    with reducer_here() as server:
        yield server.address


@pytest.fixture
def dumps(monkeypatch, tmp_path):
    directory = tmp_path / "dumps"
    monkeypatch.setenv("REDUCTION_DUMP", str(directory))
    return directory


def train(client, left_out=(-1, -1, -1), *, named=False, sizes=SIZES):
    """Make three steps; `left_out`: rank, step and layer of a call that it does not make."""
    for step in range(3):
        works = []
        for layer, size in enumerate(sizes):
            if (client.rank, step, layer) != left_out:
                name = f"layer{layer}.weight" if named else None
                works.append(client.all_reduce(np.ones((size, 2), np.float32), name=name))
        for work in works:
            work.wait()


def trained(server, job, ranks, steps):
    """Train in one thread for each rank; return the errors of all."""

    def to_the_end(client):
        try:
            with client:
                steps(client)
        except ReductionError as error:
            return str(error)
        return ""

    with joined(ranks, servers=server, job=job, timeout=3) as clients, ThreadPoolExecutor() as pool:
        return list(pool.map(to_the_end, clients))


def test_who_left_a_call_out_is_named(server, dumps):
    errors = trained(server, "skip", 3, lambda client: train(client, (2, 2, 3)))
    assert any("all-reduce 15" in error for error in errors)
    (found,) = examine_dumps(dumps)
    assert (found.rank, found.call, found.name) == (2, 15, None)
    assert "mean of Float [40x2] at " + __file__ in found.message
    assert "went on with the one after it, mean of Float [5000x2]" in found.message


def test_who_left_a_call_out_is_named_by_what_follows(server, dumps):
    sizes = (300, 40) * 3  # each size comes after the other one
    trained(server, "first", 3, lambda client: train(client, (1, 0, 2), sizes=sizes))
    (found,) = examine_dumps(dumps)
    assert (found.rank, found.call) == (1, 2)
    assert "did not make all-reduce 2 (mean of Float [300x2]" in found.message
    assert "went on with the one after it" in found.message


def test_who_left_the_last_call_out_is_named(server, dumps):
    steps = lambda client: train(client, (0, 1, 2), sizes=(7, 7, 7))  # noqa: E731 (as above)
    trained(server, "short", 3, steps)
    (found,) = examine_dumps(dumps)
    assert (found.rank, found.call) == (0, 8)
    assert "its last one is 7; all are of one size" in found.message


def test_who_left_a_named_call_out_is_named(server, dumps):
    trained(server, "named/skip", 3, lambda client: train(client, (1, 2, 3), named=True))
    (found,) = examine_dumps(dumps)
    assert (found.rank, found.call, found.name) == (1, 2, "layer3.weight")
    assert "rank 1 did not make call 3 of 'layer3.weight' (mean of Float [40x2]" in found.message


def test_those_who_wait_in_an_earlier_call_are_not_accused(server, dumps):
    def steps(client):
        for layer, size in enumerate(SIZES):
            if (client.rank, layer) != (2, 3):
                client.all_reduce(np.ones(size, np.float32), name=f"layer{layer}").wait()

    trained(server, "waits", 3, steps)
    (found,) = examine_dumps(dumps)
    assert (found.rank, found.call, found.name) == (2, 0, "layer3")


def test_calls_by_name_have_the_same_places_in_all_files(server, dumps):
    def steps(client):
        names = ["a", "b", "c"] if client.rank else ["c", "a", "b"]
        for _ in range(2):
            works = [client.all_reduce(np.ones(3, np.float32), name=name) for name in names]
            for work in works:
                work.wait()

    assert trained(server, "order", 2, steps) == ["", ""]
    places = [
        {
            (entry["reduction"]["name"], entry["reduction"]["call"]): entry["collective_seq_id"]
            for entry in document(dumps, "order", rank)["entries"]
        }
        for rank in range(2)
    ]
    assert places[0] == places[1]
    assert sorted(places[0].values()) == [*range(6)]


def test_who_made_another_call_is_named(server, dumps):
    def steps(client):
        train(client)
        client.all_reduce(np.ones(8 if client.rank == 1 else 9, np.float32)).wait()

    trained(server, "other", 3, steps)
    (found,) = examine_dumps(dumps)
    assert (found.rank, found.call) == (1, 18)
    assert "made another all-reduce 18 than 2 other ranks: mean of Float [8]" in found.message


def test_calls_that_fit_together_are_no_finding(server, dumps):
    assert trained(server, "well", 2, train) == ["", ""]
    assert examine_dumps(dumps) == []
    said = run_command(*DOCTOR, "--dump", dumps)
    assert (said.returncode, said.stdout) == (
        0,
        "no call failed, and all ranks made the same ones\n",
    )


def test_of_two_ranks_nobody_is_accused_without_a_reason(server, dumps):
    trained(server, "pair", 2, lambda client: train(client, (0, 2, 3)))
    (found,) = examine_dumps(dumps)
    assert (found.rank, found.call) == (None, 15)
    assert "it shows of none which one is wrong" in found.message


def test_a_refused_call_by_name_is_no_call_of_the_others(server, dumps):
    def steps(client):
        for _ in range(2):
            client.all_reduce(np.ones(2, np.float32), name="x").wait()
        if client.rank == 0:
            with pytest.raises(ConfigError):
                client.all_reduce(np.ones(2, np.complex64), name="x")
        else:
            client.all_reduce(np.ones(2, np.float32), name="x").wait()

    trained(server, "refused-name", 2, steps)
    (found,) = examine_dumps(dumps)
    assert (found.rank, found.call, found.name) == (0, 2, "x")
    assert "rank 0 did not make call 3 of 'x'" in found.message


@pytest.mark.parametrize("name", [b"abc", ("a", 1), 7, ["x"]])
def test_a_name_that_is_none_costs_the_file_nothing(server, dumps, name):
    def steps(client):
        with pytest.raises(ConfigError):
            client.all_reduce(np.ones(2, np.float32), name=name)
        client.all_reduce(np.ones(2, np.float32)).wait()

    assert trained(server, "odd-name", 1, steps) == [""]
    refused, made = document(dumps, "odd-name", 0)["entries"]
    assert {refused["reduction"]["name"], made["reduction"]["name"]} == {None, repr(name)}
    assert examine_dumps(dumps) == []


def test_a_child_leaves_its_parents_file_alone(server, dumps):
    def steps(client):
        client.all_reduce(np.ones(2, np.float32)).wait()
        child = os.fork()
        if child == 0:
            client.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        assert not dumps.exists()
        client.all_reduce(np.ones(2, np.float32)).wait()

    with joined(1, servers=server, job="forked") as (client,):  # here is the only thread
        steps(client)
    assert len(document(dumps, "forked", 0)["entries"]) == 2


def test_a_run_is_not_compared_with_an_earlier_one(server, dumps):
    assert trained(server, "again", 3, train) == [""] * 3
    trained(server, "again", 2, lambda client: train(client, sizes=(5, 6)))
    assert examine_dumps(dumps) == []


def test_a_generation_has_files_of_its_own(server, dumps):
    for generation in range(2):
        with joined(1, servers=server, job="restarted", generation=generation) as (client,):
            client.all_reduce(np.ones(2, np.float32)).wait()
    assert {path.parent.name for path in dumps.rglob("calls-0.json")} == {
        "restarted",
        "restarted-generation-1",
    }


@pytest.mark.extended("test_those_who_wait_in_an_earlier_call")
def test_a_disk_that_hangs_keeps_nobody_waiting(server, dumps):
    (dumps / "hangs").mkdir(parents=True)
    os.mkfifo(dumps / "hangs" / "calls-0.tmp")  # who opens it waits for a reader

    def steps(client):
        with pytest.raises(MismatchError):
            client.all_reduce(np.ones(1 + client.rank, np.float32)).wait(10)

    with joined(2, servers=server, job="hangs") as clients, ThreadPoolExecutor() as pool:
        list(pool.map(steps, clients))
        descriptor = os.open(dumps / "hangs" / "calls-0.tmp", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        while os.read(descriptor, 1 << 16):
            pass
        os.close(descriptor)


def test_a_rank_without_a_file_is_missed(server, dumps):
    trained(server, "lost", 3, lambda client: train(client, (2, 2, 3)))
    (dumps / "lost" / "calls-2.json").unlink()
    said = run_command(*DOCTOR, "--json", "--dump", dumps)
    assert said.returncode == 1
    messages = [one["message"] for one in json.loads(said.stdout)["findings"]]
    assert messages[0].startswith("rank 2 left no file")
    assert "rank 0: all-reduce 15 (mean of Float [40x2] at" in messages[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "set REDUCTION_DUMP to a directory at every rank"),
        ("{}", "calls-0.json is no file of a rank's calls"),
        ("{", "calls-0.json is no file of a rank's calls"),
        ("[" * 100_000, "calls-0.json is no file of a rank's calls"),
        ('{"entries": [], "reduction": {"job": 1, "ranks": "x"}}', "is no file of a rank's calls"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "calls-0.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        examine_dumps(tmp_path)


def document(dumps, job, rank):
    return dict(json.loads((dumps / job / f"calls-{rank}.json").read_bytes()))


def test_the_file_is_bounded(server, dumps):
    def steps(client):
        for _ in range(recording.KEPT + 20):
            client.all_reduce(np.ones(1, np.float32)).wait()

    assert trained(server, "many", 1, steps) == [""]
    entries = document(dumps, "many", 0)["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == [*range(20, recording.KEPT + 20)]
    assert {entry["state"] for entry in entries} == {"completed"}
    times = [(one["time_created_ns"], one["time_discovered_completed_ns"]) for one in entries]
    assert all(created <= completed for created, completed in times)


def test_a_refused_call_uses_its_number_up(server, dumps):
    def steps(client):
        with pytest.raises(ConfigError):
            client.all_reduce(np.ones(3, np.complex64))
        client.decline(ValueError("not today"))
        client.all_reduce(np.ones(2, np.float32)).wait()

    assert trained(server, "refused", 1, steps) == [""]
    refused, declined, made = document(dumps, "refused", 0)["entries"]
    assert refused["reduction"]["error"]["type"] == "ConfigError"
    assert declined["reduction"]["error"]["message"] == "not today"
    assert [one["collective_seq_id"] for one in (refused, declined, made)] == [0, 1, 2]
    assert made["reduction"]["error"] is None


def test_the_file_says_who_is_connected_and_who_is_slow(server, dumps):
    with joined(1, servers=server, job="told") as (client,):
        (link,) = inside.communicator(client).flat.session.links
        link.straggler = Straggler(rank=0, cause="slow", share=0.5, median_s=0.1)
        assert client.summary().straggler == link.straggler
        client.decline(ReductionTimeout("so that it is written", missing=()))
        eventually(lambda: [*dumps.glob("told/calls-0.json")])
        about = document(dumps, "told", 0)["reduction"]
    assert about["links"] == [{"reducer": server, "state": "MEMBER", "connected": True}]
    assert about["straggler"] == {"rank": 0, "cause": "slow", "share": 0.5, "median_s": 0.1}
    assert (about["rank"], about["present"], about["joined_late"]) == (0, [0], False)


def test_what_cannot_be_written_fails_no_call(server, dumps, caplog):
    dumps.write_text("a file")
    errors = trained(server, "unwritten", 2, lambda client: train(client, (1, 2, 3)))
    assert any("all-reduce 15" in error for error in errors)
    assert "the latest calls could not be written: " in caplog.text
    assert "another directory (REDUCTION_DUMP)" in caplog.text


def test_nothing_is_recorded_unless_asked_for(server):
    with joined(1, servers=server, job="plain") as (client,):
        assert type(client) is Client


@pytest.mark.extended("test_calls_by_name_have_the_same_places")
def test_pytorchs_analyzer_reads_the_files(server, dumps):
    trained(server, "analyzed", 3, lambda client: train(client, (2, 2, 3)))
    analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    said = subprocess.run(
        [*analyzer, dumps / "analyzed"], capture_output=True, text=True, check=True
    )
    first = (said.stdout + said.stderr).partition("sequence number: 15 has errors")[2]
    assert "Error type: SIZE_OR_SYNTAX_MISMATCH" in first.partition("sequence")[0]
