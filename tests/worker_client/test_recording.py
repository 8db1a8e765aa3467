"""The latest calls of each rank: what the files tell, and what the doctor finds in them."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from reducer.errors import ConfigError, MismatchError, ReductionError, ReductionTimeout
from reducer.wire.messages import Straggler
from tests import inside
from tests.commands import run_here
from tests.conftest import joined, reducer_here
from tests.waits import eventually
from tests.worker_client.transcripts import GOLDEN, scenarios
from worker_client.client import recording
from worker_client.commands.doctor.dumps import examine_dumps

pytestmark = pytest.mark.usefixtures("no_settings")

SIZES = (1000, 300, 40, 60)


SCENARIOS = scenarios("findings.txt")
RANK = re.compile(r"  (earlier )?rank (\d+): (.*)")
CALL = re.compile(r"(?:(\w+):)?(\d+)([!-]?)")


def entries(calls):
    """Yield calls in the form of a rank's file."""
    made = {}
    for at, (name, elements, how) in enumerate(CALL.fullmatch(one).groups() for one in calls):
        made[name] = made.get(name, -1) + 1
        its = {"name": name, "call": None if how == "-" else made[name], "op": "mean"}
        its["error"] = {"type": "ReductionError", "message": "failed"} if how else None
        yield {
            "record_id": at,
            "pg_id": int(name is not None),
            "input_sizes": [[int(elements)]],
            "input_dtypes": ["Float"],
            "time_created_ns": at,
            "retired": True,
            "frames": [],
            "reduction": its,
        }


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_findings(scenario, tmp_path):
    lines = SCENARIOS[scenario].splitlines()
    ranks = [found.groups() for line in lines if (found := RANK.fullmatch(line))]
    for run, rank, calls in ranks:
        of_the_run = range(1 + max(int(other) for its, other, _ in ranks if its == run))
        began_ns = 0 if run else 1000
        about = {"job": "job", "generation": 0, "rank": int(rank), "joined_late": False}
        about |= {"ranks": [*of_the_run], "present": [*of_the_run]}
        about |= {"began_ns": began_ns, "written_ns": began_ns + 100}
        path = tmp_path / f"calls-{run or ''}{rank}.json"
        path.write_text(json.dumps({"entries": [*entries(calls.split())], "reduction": about}))
    said = [f"  doctor: {found.message}" for found in examine_dumps(tmp_path)]
    assert said == [line for line in lines if not RANK.fullmatch(line)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "set REDUCTION_DUMP to a directory at every rank"),
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


@pytest.fixture(scope="module")
def server():
    with reducer_here() as server:
        yield server.address


@pytest.fixture
def dumps(monkeypatch, tmp_path):
    directory = tmp_path / "dumps"
    monkeypatch.setenv("REDUCTION_DUMP", str(directory))
    return directory


def ones(client, *shape, **how):
    return client.all_reduce(np.ones(shape, np.float32), **how)


def train(client, left_out=(-1, -1), *, named=False):
    """Make three steps; `left_out`: rank and layer of a call that it does not make in the last."""
    for step in range(3):
        works = []
        for layer, size in enumerate(SIZES):
            if (client.rank, layer) != left_out or step < 2:
                name = f"layer{layer}.weight" if named else None
                works.append(ones(client, size, 2, name=name))
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

    with joined(ranks, servers=server, job=job, timeout=1) as clients, ThreadPoolExecutor() as pool:
        return list(pool.map(to_the_end, clients))


def document(dumps, job, rank):
    return dict(json.loads((dumps / job / f"calls-{rank}.json").read_bytes()))


@pytest.mark.parametrize(
    ("named", "where", "what"),
    [
        (False, (2, 10, None), "all-reduce 10"),
        (True, (2, 2, "layer2.weight"), "call 3 of 'layer2.weight'"),
    ],
)
def test_who_left_a_call_out_is_named(server, dumps, named, where, what):
    job = f"named/{named}"
    assert any(trained(server, job, 3, lambda client: train(client, (2, 2), named=named)))
    (found,) = examine_dumps(dumps)
    assert found[:4] == (job, *where)
    assert f"did not make {what} (mean of Float [40x2] at {__file__}" in found.message


def described(entry):
    """Return an entry of a file, without times, as a line of golden/calls.txt."""
    (size,), (dtype,), its = entry["input_sizes"], entry["input_dtypes"], entry["reduction"]
    name = "" if its["name"] is None else f"{its['name']!r} "
    what = f"{entry['state']} {its['op']} of {dtype} {size}, {name}call {its['call']}"
    if error := its["error"]:
        message = f": {error['message']}" if error["type"] == "ValueError" else ""
        what += f", {error['type']}{message}"
    return f"{entry['process_group'][1]} {entry['collective_seq_id']}: {what}\n"


def test_calls_have_the_same_places_in_all_files(server, dumps):
    """By name there is no order in which all ranks make them; a refused one uses its number up."""

    def steps(client):
        ones(client, 2).wait()
        with pytest.raises(ConfigError):
            client.all_reduce(np.ones(3, np.complex64))
        client.decline(ValueError("not today"))
        for name in (b"abc", (7,), 7, ["x"]):  # which are none
            with pytest.raises(ConfigError):
                ones(client, 2, name=name)
        client.all_reduce(np.ones((2, 1)), "sum").wait()
        names = ["a", "b", "c"] if client.rank else ["c", "a", "b"]
        for _ in range(2):
            for work in [ones(client, 3, name=name) for name in names]:
                work.wait()

    assert trained(server, "places", 2, steps) == ["", ""]
    for rank in range(2):
        entries = document(dumps, "places", rank)["entries"]
        assert "".join(map(described, entries)) == (GOLDEN / "calls.txt").read_text()
    for rank, found in enumerate(examine_dumps(dumps)):  # nothing of the names that are none
        assert found.rank == rank
        assert "all-reduce 1 (mean of complex64" in found.message


def test_the_command_ends_as_what_it_finds(server, dumps):
    assert trained(server, "well", 2, train) == ["", ""]
    said = run_here(f"worker-client doctor --dump {dumps}")
    well = "no call failed, and all ranks made the same ones\n"
    assert (said.returncode, said.stdout) == (0, well)
    (dumps / "well" / "calls-1.json").unlink()
    said = run_here(f"worker-client doctor --json --dump {dumps}")
    assert said.returncode == 1
    (found,) = json.loads(said.stdout)["findings"]
    assert found["message"].startswith("rank 1 left no file")


def test_a_child_leaves_its_parents_file_alone(server, dumps):
    with joined(1, servers=server, job="forked") as (client,):  # here is the only thread
        ones(client, 2).wait()
        child = os.fork()
        if child == 0:
            client.shutdown()
            os._exit(0)
        os.waitpid(child, 0)
        assert not dumps.exists()
        ones(client, 2).wait()
    assert len(document(dumps, "forked", 0)["entries"]) == 2


@pytest.mark.extended("test_who_left_a_call_out")
def test_a_disk_that_hangs_keeps_nobody_waiting(server, dumps):
    (dumps / "hangs").mkdir(parents=True)
    os.mkfifo(dumps / "hangs" / "calls-0.tmp")  # who opens it waits for a reader

    def steps(client):
        with pytest.raises(MismatchError):
            ones(client, 1 + client.rank).wait(10)

    with joined(2, servers=server, job="hangs") as clients, ThreadPoolExecutor() as pool:
        list(pool.map(steps, clients))
        descriptor = os.open(dumps / "hangs" / "calls-0.tmp", os.O_RDONLY | os.O_NONBLOCK)
        os.set_blocking(descriptor, True)
        while os.read(descriptor, 1 << 16):
            pass
        os.close(descriptor)


def test_the_file_is_bounded_and_a_generation_has_one_of_its_own(server, dumps):
    for generation, calls in enumerate((2, recording.KEPT + 20)):
        with joined(1, servers=server, job="again", generation=generation) as (client,):
            for _ in range(calls):
                ones(client, 1).wait()
    assert len(document(dumps, "again", 0)["entries"]) == 2
    entries = document(dumps, "again-generation-1", 0)["entries"]
    assert [entry["collective_seq_id"] for entry in entries] == [*range(20, recording.KEPT + 20)]
    assert {entry["state"] for entry in entries} == {"completed"}
    times = [(one["time_created_ns"], one["time_discovered_completed_ns"]) for one in entries]
    assert all(created <= completed for created, completed in times)


def test_the_file_says_who_is_connected_and_who_is_slow(server, dumps):
    with joined(1, servers=server, job="told") as (client,):
        (link,) = inside.communicator(client).links
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
    errors = trained(server, "unwritten", 2, lambda client: ones(client, 8 + client.rank).wait())
    assert all("disagree on total_bytes" in error for error in errors)
    assert "the latest calls could not be written: " in caplog.text
    assert "another directory (REDUCTION_DUMP)" in caplog.text


def stall(dumps, *, stays):
    """Return steps of which rank 2 leaves out the last, and leaves, or stays till others fail."""

    def steps(client):
        ones(client, 2).wait()
        if client.rank < 2:
            ones(client, 40, 2).wait()
        elif stays:
            eventually(lambda: len([*dumps.glob("*/calls-*.json")]) == 2)

    return steps


@pytest.mark.parametrize("stays", [True, False])
def test_a_call_that_a_rank_has_not_made_is_scheduled(server, dumps, stays):
    assert all(trained(server, "stalled", 3, stall(dumps, stays=stays))[:2])
    files = [document(dumps, "stalled", rank) for rank in range(3)]
    states = [[entry["state"] for entry in file["entries"]] for file in files]
    assert states == [["completed", "scheduled"]] * 2 + [["completed"]]
    told = [[*file["pg_status"]["0"].values()] for file in files]  # enqueued, started, completed
    assert told == [[1, 0, 0]] * 2 + [[0, 0, 0]]
    assert {*files[0]["pg_status"]["1"].values()} == {-1}


@pytest.mark.extended("test_calls_have_the_same_places")
def test_pytorchs_analyzer_reads_the_files(server, dumps):
    trained(server, "analyzed", 3, lambda client: train(client, (2, 2)))
    run_here(f"worker-client doctor --pickle --dump {dumps}")
    analyzer = [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace"]
    said = subprocess.run(
        [*analyzer, dumps / "analyzed"], capture_output=True, text=True, check=True
    )
    first = (said.stdout + said.stderr).partition("sequence number: 10 has errors")[2]
    assert "Error type: SIZE_OR_SYNTAX_MISMATCH" in first.partition("sequence")[0]


@pytest.mark.extended("test_a_call_that_a_rank_has_not_made")
@pytest.mark.parametrize("stays", [True, False])
def test_nvidias_analyzer_names_the_rank_that_did_not_make_the_call(server, dumps, stays):
    package = pytest.importorskip("nvidia_resiliency_ext", reason="needs nvidia-resiliency-ext")
    if not Path(package.__file__).with_name("attribution").is_dir():
        pytest.skip("needs nvidia-resiliency-ext 0.6 or later: 0.4.1 has no analyzer of traces")
    trained(server, "stalled", 3, stall(dumps, stays=stays))
    run_here(f"worker-client doctor --pickle --dump {dumps}")
    analyzer = [
        sys.executable,
        "-m",
        f"{package.__name__}.attribution.trace_analyzer.fr_attribution",
    ]
    arguments = ["--fr-path", dumps / "stalled", "--pattern", "rank_*", "--emit-stdout"]
    said = subprocess.run([*analyzer, *arguments], capture_output=True, text=True, check=True)
    _, row = said.stdout.strip().splitlines()
    cells = [cell.strip() for cell in row.split("|")]
    assert cells == ["0", "calls in order,0", "gloo:all_reduce", "40x2", "Float", "2"]
