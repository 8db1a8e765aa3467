"""`worker-client doctor --gain`: of a script that runs, of what was recorded, and refusals."""

import contextlib
import json
from types import SimpleNamespace

import pytest

from tests.commands import run_here
from tests.launch.conftest import bare_environment
from tests.ranks import environments, ranks

torch = pytest.importorskip("torch", reason="needs torch")

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure  # noqa: E402 (as below)

from reducer.planning.step_model import Prediction, Way  # noqa: E402 (as above)
from worker_client.commands.gain import links  # noqa: E402 (it needs torch)
from worker_client.commands.gain.answer import NOT_ATTACHED, Answer  # noqa: E402 (as above)

COMPUTE_S = 0.15
COMMAND = "from worker_client.cli import main; main()"
TRAINING = ("--", "-m", "bench.gain_train", "mlp", COMPUTE_S)
NBYTES = 4 * 5 * (1024 * 1024 + 1024)  # of its gradients
COMMON = ("--gain", "--json", "--steps", "3")


def gain(environments, *arguments):
    """Run the command at every rank; return what each has printed."""
    with ranks(environments, "-c", COMMAND, "doctor", *COMMON, *arguments) as job:
        return job.outputs()


def check_measured(facts):
    """The training sleeps for a known time, two thirds of it backwards, five layers one by one."""
    step = facts["measured"]
    assert COMPUTE_S <= step["compute_s"] <= 1.5 * COMPUTE_S
    assert 0.6 * COMPUTE_S <= step["backward_s"] <= step["compute_s"]
    assert sum(one["nbytes"] for one in step["buckets"]) == NBYTES
    ready_s = [one["ready_s"] for one in step["buckets"]]
    assert ready_s == sorted(ready_s)
    assert 0.3 * COMPUTE_S < ready_s[0] < ready_s[-1] <= step["compute_s"]
    # Each tensor of a layer but its bias, of 4 KiB, would be rounded, in a call of its own.
    biased = [one["nbytes"] > one["rounded"] for one in step["buckets"]]
    assert sum(one["calls"] for one in step["buckets"]) == 5 + sum(biased)
    assert 0 < facts["costs"]["call_s"] < 0.1
    assert sum(one["rounded"] for one in step["buckets"]) == 4 * 5 * 1024 * 1024


def test_two_ranks_measure_their_steps_and_links():
    with ranks(environments(2), "-c", COMMAND, "doctor", *COMMON, *TRAINING) as job:
        first, second = job.outputs()
        assert "reduction: rank" not in job[0].err  # of the job by which costs are measured
    assert not second
    facts = json.loads(first)
    check_measured(facts)
    assert facts["links"]["measured"]
    assert facts["links"]["worker_rate"] > 50e6  # loopback
    assert facts["measured"]["now_s"] >= COMPUTE_S
    by_name = {way["name"]: way for way in facts["ways"]}
    assert next(iter(by_name)) == "Gloo"
    assert by_name["no exchange"]["step_s"] == facts["measured"]["compute_s"]
    assert by_name["2 reducers, int8"]["step_s"] >= by_name["no exchange"]["step_s"]
    assert facts["advice"].endswith(".")
    assert not facts["attached"]


def test_advice_to_train_otherwise_names_the_best_for_the_steps_as_they_are():
    job = SimpleNamespace(step=SimpleNamespace(nbytes=4), nodes=2, network=None, every=50)
    steps_s = {
        Way("gloo"): 8.0,
        Way("reducers"): 8.0,
        Way("reducers", 0, "int8"): 2.5,
        Way("diloco", 0, "int8"): 1.01,
        Way("none"): 1.0,
    }
    found = tuple(Prediction(way, step_s / 2, step_s) for way, step_s in steps_s.items())
    bf16 = Prediction(Way("reducers", 0, "bf16"), 2.0, 4.0)
    advice = Answer(job, (*found[:2], bf16, *found[2:]), None, True, attached=False).advice()
    assert advice == (
        "Take DiLoCo, every 50 steps, int8, the ranks' own reducers, which trains otherwise "
        "(docs/slow-links.md): a step is 7.92 times as fast as with Gloo; with no exchange at all "
        "it would be 8.00 times. Or keep the script's steps and take the ranks' own reducers, int8 "
        f"(REDUCTION_WIRE_DTYPE=int8): 3.20 times. {NOT_ATTACHED}"
    )


def test_rates_and_costs_are_those_of_what_was_timed(monkeypatch):
    """Where a ring of 4 ranks takes 5 ms and carries 100 MB/s, and all else that is timed 0.2 s."""
    rate, ranks = 100e6, SimpleNamespace(size=lambda: 4)
    takes_s = {"_seconds": lambda _, nbytes: 0.005 + 1.5 * nbytes / rate}
    takes_s["_median_s"] = lambda call: (call(), 0.2)[1]
    for name, timed in takes_s.items():
        monkeypatch.setattr(links, name, timed)
    assert links.ring_rate(ranks) == pytest.approx(rate)
    narrowed_and_widened_s = 2 * 0.2 / (8 << 20)
    assert links.cast_s() == pytest.approx(dict.fromkeys(("bf16", "int8"), narrowed_and_widened_s))
    assert links.outer_s() == pytest.approx(8 * 0.2 / (32 << 20))
    monkeypatch.setattr(links.dist, "barrier", lambda _: None)
    made = []
    client = SimpleNamespace(
        all_reduce=lambda row, _: made.append(row) or SimpleNamespace(wait=lambda: None)
    )
    monkeypatch.setattr(links, "connect", lambda **_: contextlib.nullcontext(client))
    assert links.call_s(ranks) == pytest.approx(0.2 / len(made))


def test_one_process_needs_no_launcher_and_measures_its_steps_alone(tmp_path):
    (alone,) = environments(1)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del alone[name]
    (said,) = gain([alone], "--workers", "4", "--gbps", "1", "--reducers", "4", *TRAINING)
    facts = json.loads(said)
    check_measured(facts)
    assert (facts["ranks"], facts["machines"], facts["measured"]["now_s"]) == (4, 4, None)
    by_name = {way["name"]: way for way in facts["ways"]}
    # 1.5 times 21 MB at 119.5 MB/s, and little of it beside a backward pass of 100 ms.
    assert by_name["Gloo"]["all_reduce_s"] == pytest.approx(0.2635, rel=0.02)
    assert by_name["4 reducers"]["all_reduce_s"] == pytest.approx(0.18, rel=0.03)


SIZES = (8_000_000, 4_000_000, 16_000)  # bytes of three buckets
READY_S = (0.04, 0.06, 0.09)  # after the step before has ended
EXCHANGE_S = 0.05  # the last bucket's result comes so much later
STEP_S = READY_S[-1] + EXCHANGE_S


def exchanges(steps):
    """Yield begin and end of a training's all-reduces, us, and their sizes."""
    for step in range(steps):
        for ready_s, size in zip(READY_S, SIZES, strict=True):
            begin_s = 5.0 + step * STEP_S + ready_s
            end_s = 5.0 + (step + 1) * STEP_S if size == SIZES[-1] else begin_s + 0.045
            yield 1e6 * begin_s, 1e6 * (end_s - begin_s), size


def timeline(steps, ranks, dtype="float32"):
    named = {"ph": "M", "name": "process_name", "args": {"name": f"rank 0 of {ranks}, job"}}
    about = {"dtype": dtype, "op": "mean", "sequence": 1}
    first = {"ph": "X", "name": "all", "ts": 1e6, "dur": 9.0, "args": {**about, "bytes": 4}}
    return [named, first] + [
        {"ph": "X", "name": "all", "ts": ts, "dur": dur, "args": {**about, "bytes": size}}
        for ts, dur, size in exchanges(steps)
    ]


def profile(steps, ranks, name="gloo:all_reduce", *, shapes=True):
    said = [
        {"Input Dims": [[size // 4]], "Input type": ["float"]} if shapes else {}
        for *_, size in exchanges(steps)
    ]
    asked = [
        {"ph": "X", "name": "c10d::allreduce_", "ts": ts, "dur": 9.0, "args": {}}
        for ts, *_ in exchanges(steps)
    ]
    forwards = [
        {"ph": "X", "name": "DistributedDataParallel.forward", "ts": ts - 1e4, "dur": 9e3}
        for ts, _, size in exchanges(steps)
        if size == SIZES[0]
    ]
    # Gloo's thread has time for one a little after it was asked, and was busy before the trace.
    done = [{"ph": "X", "name": name, "ts": 1.0, "dur": 9.0, "args": {}}] + [
        {"ph": "X", "name": name, "ts": ts + 2e3, "dur": dur - 2e3, "args": about}
        for (ts, dur, _), about in zip(exchanges(steps), said, strict=True)
    ]
    return {"traceEvents": [*done, *asked, *forwards], "distributedInfo": {"world_size": ranks}}


def read(path, content, options="--gbps 1"):
    """Return exit code, output and errors of the command for a file with that content."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    line = f"worker-client doctor --gain --json --trace {path} {options}"
    done = run_here(line, env=bare_environment())
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("recorded", [timeline, profile])
def test_a_step_is_read_from_what_a_run_has_recorded(recorded, tmp_path):
    code, said, _ = read(tmp_path / "recorded.json", recorded(6, 4))
    assert code == 0
    facts = json.loads(said)
    step = facts["measured"]
    assert step["now_s"] == pytest.approx(STEP_S)
    assert step["compute_s"] == pytest.approx(READY_S[-1])
    assert [one["nbytes"] for one in step["buckets"]] == list(SIZES)
    assert [one["rounded"] for one in step["buckets"]] == [*SIZES[:2], 0]
    assert [one["ready_s"] for one in step["buckets"]] == pytest.approx(list(READY_S))
    assert facts["ranks"] == 4


def test_a_timeline_that_a_client_has_written(tmp_path):
    code = (
        "import time, numpy as np, torch.distributed as dist, worker_client\n"
        "dist.init_process_group('gloo')  # so that each rank hosts a reducer\n"
        "client = worker_client.init()\n"
        "for _ in range(6):\n"
        "    time.sleep(0.3)  # by far the longer rest, and steps are alike on a busy machine too\n"
        "    first = client.all_reduce(np.ones(200_000, np.float32))\n"
        "    time.sleep(0.02)\n"
        "    second = client.all_reduce(np.ones(300_000, np.float32))\n"
        "    first.wait(), second.wait()\n"
        "client.shutdown()\n"
    )
    told = {"REDUCTION_TIMELINE": str(tmp_path), "REDUCTION_JOB": "read"}
    with ranks(environments(2, **told), "-c", code) as job:
        job.finish()
    recorded = (tmp_path / "read-rank0.json").read_text()
    code, said, complained = read(tmp_path / "copy.json", recorded)
    assert code == 0, complained
    step = json.loads(said)["measured"]
    assert [one["nbytes"] for one in step["buckets"]] == [800_000, 1_200_000]
    first_s, second_s = (one["ready_s"] for one in step["buckets"])
    assert 0.3 <= first_s < 0.4
    assert first_s + 0.02 <= second_s <= step["compute_s"] < 0.6


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        ("[", "--gbps 1", "neither a timeline of a rank (REDUCTION_TIMELINE) nor a trace"),
        (timeline(2, 4), "--gbps 1", "has 7 all-reduces in which no 3 steps are alike"),
        (timeline(6, 4), "", "does not say what links carry: give --gbps"),
        (timeline(6, 4, "block8"), "--gbps 1", "record it without REDUCTION_WIRE_DTYPE"),
        (profile(6, 4, "nccl:all_reduce"), "--gbps 1", "has no all-reduces of Gloo"),
        (profile(6, 4, shapes=False), "--gbps 1", "profile(record_shapes=True)"),
        (timeline(6, 4), "--gbps 1 --workers 1", "workers must be 2 at least, got 1"),
        (timeline(6, 4), "--gbps 0", "gbps must be from 0.001 to"),
        (timeline(6, 4), "--gbps 1 --reducers few", "reducers: write numbers such as 4,8"),
    ],
)
def test_what_cannot_be_read_is_refused(content, options, says, tmp_path):
    code, said, complained = read(tmp_path / "recorded.json", content, options)
    assert (code, said) == (2, "")
    assert says in " ".join(complained.split())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--gain", "--gain needs a training: give a script"),
        ("--trace x.json", "a script and --trace go with --gain"),
        ("--gain -- train.py", "one rank cannot measure a network: say by --workers"),
        ("--gain --workers 4 --gbps 1 -- none.py", "there is no script 'none.py'"),
        ("--gain --workers 4 --gbps 1 -- ls", "'ls' is no script of Python"),
    ],
)
def test_what_cannot_be_run_is_refused(line, says):
    done = run_here(f"worker-client doctor {line}", env=bare_environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert says in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("pass", "has ended, and it has wrapped no model in DistributedDataParallel: have it"),
        (
            """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
for _ in range(4):
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model(torch.ones(1, 2))  # an evaluation is no step
""",
            "it has made 3 whole steps of the 6 needed",
        ),
        (
            """
import torch
optimizer = torch.optim.SGD([torch.zeros(1)])
while True:  # it would train for ever
    optimizer.step()
""",
            "made 6 optimizer steps without a model in DistributedDataParallel, and was stopped",
        ),
    ],
)
def test_a_script_that_ends_too_soon_is_told(script, says, tmp_path):
    (tmp_path / "train.py").write_text(script)
    (alone,) = environments(1)
    del alone["WORLD_SIZE"]
    options = ("--workers", "4", "--gbps", "1", "--", tmp_path / "train.py")
    with ranks([alone], "-c", COMMAND, "doctor", *COMMON, *options) as (rank,):
        assert rank.wait(60) == 2
        assert says in " ".join(rank.err.split())


def test_a_model_that_is_attached_and_accumulates_is_measured_as_well(tmp_path):
    (tmp_path / "train.py").write_text("""
import torch, torch.distributed as dist, worker_client
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1000, 100))
worker_client.attach(model)
while True:
    with model.no_sync():  # a step has two backward passes
        model(torch.ones(7, 1000)).sum().backward()
    model(torch.ones(7, 1000)).sum().backward()
""")
    first, _ = gain(environments(2), "--", tmp_path / "train.py")
    facts = json.loads(first)
    assert facts["measured"]["samples"] == 28
    assert facts["attached"]
    assert sum(one["nbytes"] for one in facts["measured"]["buckets"]) == 4 * (100_000 + 100)


def test_a_host_that_others_cannot_reach_is_named_before_they_wait_for_it(tmp_path):
    """Where its own name is a loopback address, as on Debian: here one that nobody has."""
    file = tmp_path / "error.json"  # of which torchrun prints at its end what is in it
    several = bare_environment(
        RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="nosuch.invalid"
    )
    several["TORCHELASTIC_ERROR_FILE"] = str(file)
    done = run_here("worker-client doctor --gain -- -m bench.gain_train mlp 0.1", several)
    assert done.returncode == 2
    assert "'nosuch.invalid', does not resolve" in " ".join(done.stderr.split())
    assert "'nosuch.invalid', does not resolve" in ProcessFailure(0, 1, 2, str(file)).message
