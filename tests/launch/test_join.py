"""`worker-client join`: how machines meet, what is decided for them, and that they train alike."""

import json
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from subprocess import PIPE

import pytest

from lab import Lab
from reducer import __version__
from reducer.errors import AuthError, ConfigError, MembershipError
from reducer.planning.network_model import Network
from reducer.planning.step_model import Bucket, Step, TrainingJob
from tests.commands import free_ports, run_here
from tests.launch.conftest import ROOT, bare_environment
from tests.pages import FINGERPRINT, blocks
from worker_client import batch_part, config
from worker_client.commands.gain.answer import Answer
from worker_client.commands.join import measure, meet
from worker_client.commands.join.run import PORT, decision, read

SECRET = "of-these-tests"  # noqa: S105 (it guards nothing)
LIMIT_S = 200
JOIN = [sys.executable, "-c", "from worker_client.cli import main; main()", "join"]
TRAINING = str(ROOT / "tests" / "launch" / "join_training.py")


@pytest.mark.parametrize(
    ("line", "first", "script"),
    [
        ("train.py --epochs 3", None, "train.py --epochs 3"),
        ("train.py -- x", None, "train.py -- x"),
        ("-m training", None, "-m training"),
        ("alpha -- train.py", ("alpha", PORT), "train.py"),
        ("alpha:99 -- -m training", ("alpha", 99), "-m training"),
    ],
)
def test_what_a_line_says(line, first, script):
    assert read(line.split(), None) == (first, script.split())


@pytest.mark.parametrize("line", ["", "alpha --", "a:b:c -- t.py"])
def test_what_no_line_says(line):
    with pytest.raises(ConfigError, match="write"):
        read(line.split(), None)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("127.0.0.1 -- {script}", "has printed a secret"),
        ("--secret short -- {script}", "12 characters"),
        ("-- nosuch.py", "there is no script"),
    ],
)
def test_what_is_refused_before_anybody_meets(line, why):
    done = run_here(f"worker-client join {line.format(script=TRAINING)}", bare_environment())
    assert (done.returncode, why in done.stderr.replace("\n    ", " ")) == (2, True), done.stderr


def test_under_a_launcher_it_is_refused():
    settings = bare_environment(RANK="0", WORLD_SIZE="2")
    done = run_here(f"worker-client join -- {TRAINING}", settings)
    assert "env:// has started this process (RANK)" in done.stderr.replace("\n    ", " ")


def test_a_rank_is_told_who_it_is_and_several_are_torchruns():
    alone = decision(1, [1, 1], "10.0.0.7", 2000, ["train.py"])
    assert alone.argv == (sys.executable, "train.py")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    assert [alone.sets[name] for name in names] == ["1", "2", "0", "10.0.0.7", "2000"]
    several = " ".join(decision(1, [2, 1], "10.0.0.7", 2000, ["train.py"]).argv)
    assert "--nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr 10.0.0.7" in several


def answer(speeds, rate, nbytes=10_000_000, compute_s=0.4):
    """What was measured of a model whose gradients are ready at the end of a step."""
    step = Step(compute_s, (Bucket(compute_s, nbytes, nbytes),))
    network = Network(rate, rate, 0.0005)
    return Answer(TrainingJob(step, len(speeds), len(speeds), network), (), None, True, speeds)


@pytest.mark.parametrize(
    ("speeds", "rate", "shares", "wire"),
    [
        ((100.0, 100.0), 1e9, [0.5, 0.5], "none"),
        ((300.0, 100.0), 1e9, [0.75, 0.25], "none"),
        # 10 MB take 50 ms of 400, then half of that.
        ((100.0, 100.0), 200e6, [0.5, 0.5], "bf16"),
        ((100.0, 100.0), 20e6, [0.5, 0.5], "int8"),
        ((100.0, 100.0), 1e6, [0.5, 0.5], "int8"),  # and an outer optimizer would do better
        # With its share a slow rank is ready in half the time: 10 % of that are 20 ms.
        ((300.0, 100.0), 200e6, [0.75, 0.25], "int8"),
        ((2.0, 1.0, 1.0), 1e9, [0.5, 0.25, 0.25], "none"),
    ],
)
def test_shares_follow_speeds_and_the_wire_follows_the_link(speeds, rate, shares, wire):
    sets = measure.decided(answer(speeds, rate), divides=True)["sets"]
    assert sets["REDUCTION_WIRE_DTYPE"] == wire
    assert [float(one) for one in sets["REDUCTION_BATCH_SHARES"].split(",")] == shares


def test_a_script_that_cannot_be_measured_trains_by_equal_shares(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise ConfigError("no steps")

    monkeypatch.setattr(measure, "of_script", refuse)
    for rank in (1, 0):
        assert not (tmp_path / "found").exists()
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        measure.main(str(tmp_path / "found"), "train.py")
    found = json.loads((tmp_path / "found").read_text())
    said, instead = found.pop("said")
    assert (found, said) == ({}, "nothing is measured: no steps")
    assert "REDUCTION_WIRE_DTYPE" in instead


@pytest.mark.parametrize("attached", [True, False])
def test_a_script_that_sends_nothing_through_reducers_is_told(attached):
    measured = replace(answer((1.0, 1.0), 20e6), attached=attached)
    said = measure.decided(measured, divides=True)["said"]
    assert any("worker_client.attach(model)" in line for line in said) is not attached


@pytest.mark.parametrize(
    ("speeds", "samples", "told"),
    [((300.0, 100.0), None, True), ((300.0, 100.0), 8, False), ((100.0, 97.0), None, False)],
)
@pytest.mark.usefixtures("no_settings")
def test_a_script_that_takes_no_notice_of_its_share_is_told(
    tmp_path, monkeypatch, speeds, samples, told
):
    def train(*_, **__):
        if samples:
            batch_part(samples)
        return answer(speeds, 1e9)

    monkeypatch.setattr(measure, "of_script", train)
    monkeypatch.setattr(config, "batch_part", config.batch_part)  # which is put back
    measure.main(str(tmp_path / "found"), "train.py")
    said = json.loads((tmp_path / "found").read_text())["said"]
    assert any("does not call worker_client.batch_part()" in line for line in said) is told


@pytest.mark.parametrize("shares", ["", "0.75,0.25", "0.01,0.99", "3,2,1,0.001"])
@pytest.mark.parametrize("samples", [4, 5, 64, 1001])
def test_parts_of_a_batch_are_all_of_it(monkeypatch, no_settings, shares, samples):
    each = [float(one) for one in shares.split(",")] if shares else [1.0] * 3
    monkeypatch.setenv("REDUCTION_BATCH_SHARES", shares)
    monkeypatch.setenv("WORLD_SIZE", str(len(each)))
    parts = []
    for rank in range(len(each)):
        monkeypatch.setenv("RANK", str(rank))
        parts.append(batch_part(samples))
    assert [sample for part in parts for sample in part] == list(range(samples))
    for part, share in zip(parts, each, strict=True):
        assert len(part) >= 1
        assert abs(len(part) - samples * share / sum(each)) <= len(each)


def test_a_batch_that_cannot_be_divided(monkeypatch, no_settings):
    assert batch_part(7) == range(7)  # a process that is alone
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="too small for 2 ranks"):
        batch_part(1)
    monkeypatch.setenv("REDUCTION_BATCH_SHARES", "0.5,0.3,0.2")
    with pytest.raises(ConfigError, match="has 3 shares, and the job 2 ranks"):
        batch_part(64)


@contextmanager
def first_machine(machines=2):
    """Wait for machines as the first one does; yield its port, what it finds and what it says."""
    told = []
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        listener.settimeout(30)
        found = pool.submit(meet.gather, listener, SECRET, machines, told.append)
        yield listener.getsockname()[1], found, told


def find(port, secret=SECRET, **others):
    return meet.find(("127.0.0.1", port), secret, **{"machines": 2, "ranks": 1, **others})


def test_strangers_are_refused_and_the_others_come_in():
    with first_machine() as (port, found, told):
        proof = b'{"proof": "\\ud800", "nonce": "\\ud800"}\n'
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"[" * 9999 + b"\n", proof, b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(said)
        with pytest.raises(AuthError, match="another secret"):
            find(port, "another secret")
        machine, number = find(port, ranks=3)
        (other,) = found.result(20)
    assert (number, other.ranks) == (1, 3)
    assert [line.split(":")[0] for line in told[:-1]] == ["refused"] * 5
    machine.say(word="one")
    assert other.hear() == {"word": "one"}
    machine.close()
    with pytest.raises(MembershipError, match="has left"):
        other.hear()
    other.close()


@pytest.mark.parametrize(
    ("version", "refused"),
    [
        (__version__, pytest.raises(AuthError, match="another secret")),
        ("0.0.7", pytest.raises(ConfigError, match=r"has version '0\.0\.7', and this machine '")),
    ],
)
def test_what_is_no_first_machine(version, refused):
    """One shows for a proof what it was shown, the other has another version."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:

        def pretend():
            machine = meet.Machine(listener.accept()[0])
            machine.say(version=version, machines=2, nonce="0")
            with suppress(MembershipError):  # who finds another version has left
                machine.say(proof=machine.hear()["proof"], number=1)
            machine.close()

        pretended = pool.submit(pretend)
        with refused:
            find(listener.getsockname()[1])
        pretended.result(20)


def test_numbers_of_machines_that_differ_are_said():
    with first_machine() as (port, found, _):
        with pytest.raises(ConfigError, match="has machines 2, and this machine 3"):
            find(port, machines=3)
        find(port)[0].close()
        found.result(20)[0].close()


def test_where_nobody_listens():
    said = (
        r"nothing listens at .*: start worker-client join .*: start anew with --machines 3 on each"
    )
    with pytest.raises(MembershipError, match=said):
        find(*free_ports(1))
    with pytest.raises(ConfigError, match=r"'nosuch.invalid' could not be resolved"):
        meet.find(("nosuch.invalid", 1), SECRET, machines=2, ranks=1)


@contextmanager
def joined(first, other, settings=((), ()), start=None):
    """Run the command on two machines, as the first one says; yield what each has said.

    `first` and `other` are the scripts, and `start` starts a process on the machine with a number.
    """
    (port,) = free_ports(1)
    start = start or (lambda _, *given, **options: subprocess.Popen(*given, text=True, **options))
    with ExitStack() as stack:
        said = []

        def run(number, command):
            environment = bare_environment(**dict(settings[number]))
            process = start(number, command, env=environment, stdout=PIPE, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.kill)
            said.append("")
            return process

        one = run(0, [*JOIN, "--port", str(port), "--nproc-per-node", "1", "--", *first])
        for line in one.stdout:
            said[0] += line
            if typed := re.search(r"^ +worker-client join (.*) -- ", line):
                break
        two = run(1, [*JOIN, "--nproc-per-node", "1", *shlex.split(typed[1]), "--", *other])
        yield one, two, said


def outputs_of(*scripts, **how):
    """Run the command with these scripts to its end, and return what each machine has said."""
    with joined(*scripts, **how) as (one, two, said):
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in (one, two)]
        assert (one.returncode, two.returncode) == (0, 0), (said[0], *outputs)
    return outputs


def train(tmp_path, sample_s, way="weight", **how):
    """Train on machines on which a sample takes so long; return what each rank has left."""
    files = [tmp_path / "first", tmp_path / "other"]
    scripts = [[TRAINING, str(file), str(s), way] for file, s in zip(files, sample_s, strict=True)]
    outputs_of(*scripts, **how)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.extended("test_shares_follow_speeds_and_the_wire_follows_the_link")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("way", ["weight", "loss"])
def test_unlike_machines_train_as_one_with_the_whole_batch(tmp_path, way):
    torch = pytest.importorskip("torch", reason="needs torch")
    from tests.launch import join_training as its  # noqa: PLC0415 (loads torch)

    exact = {"REDUCTION_WIRE_DTYPE": "none"}  # of the first machine, which tells the other
    own = {"REDUCTION_WIRE_DTYPE": "bf16", "REDUCTION_BATCH_SHARES": "1,9"}  # is left out
    first, other = train(tmp_path, (0.002, 0.006), way, settings=(exact, own))
    assert [one[0]["RANK"] for one in (first, other)] == ["0", "1"]
    assert [one[0]["REDUCTION_WIRE_DTYPE"] for one in (first, other)] == ["none"] * 2
    assert first[1] == other[1]
    share, rest = map(float, first[1].split(","))
    assert share + rest == pytest.approx(1, abs=1e-3)
    assert 0.6 < share < 0.92  # three quarters, on a machine that does nothing else
    assert first[2] + other[2] == its.SAMPLES
    assert abs(first[2] - its.SAMPLES * share) <= 1
    assert first[3] == other[3]
    alone = its.trained(its.network(), range(its.SAMPLES), lambda _: None)
    torch.testing.assert_close(torch.tensor(first[3]), alone)


@pytest.mark.extended("test_shares_follow_speeds_and_the_wire_follows_the_link")
@pytest.mark.timeout(400)
def test_over_a_slow_link_gradients_travel_in_8_bits(namespaces, tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    with Lab(hosts=2, mbit=20) as lab:
        ranks = train(
            tmp_path,
            (0.002, 0.006),
            start=lambda number, *given, **options: lab.hosts[number].start(*given, **options),
        )
    assert [one[0]["REDUCTION_WIRE_DTYPE"] for one in ranks] == ["int8"] * 2
    assert 0.6 < float(ranks[0][1].split(",")[0]) < 0.92
    assert ranks[0][3] == ranks[1][3]


@pytest.mark.extended("test_shares_follow_speeds_and_the_wire_follows_the_link")
@pytest.mark.timeout(400)
def test_the_page_of_launchers_trains_as_shown():
    pytest.importorskip("torch", reason="needs torch")
    (line,) = blocks("docs/launchers.md", "sh", "Two machines at home")
    command, _, script = line.strip().partition(" -- ")
    assert command == "worker-client join"
    said = "".join(outputs_of([script], [script]))
    first, other = sorted(FINGERPRINT.findall(said))
    assert (first[0], other[0]) == ("0", "1")
    assert first[2:] == (other[2], "2")


def test_what_the_page_adds_to_a_script_is_what_was_tested():
    (lines,) = blocks("docs/launchers.md", "python", "Two machines at home")
    script = (ROOT / "tests" / "launch" / "join_training.py").read_text()
    for line in lines.splitlines():
        assert line.partition("  #")[0] in script


@pytest.mark.extended("test_shares_follow_speeds_and_the_wire_follows_the_link")
@pytest.mark.timeout(400)
def test_a_script_that_fails_ends_all_machines(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import sys; sys.exit(3)")
    with joined([str(script)], [str(script)]) as (one, two, _):
        said = [process.communicate(timeout=LIMIT_S)[0] for process in (one, two)]
        assert (one.returncode, two.returncode) == (1, 1), said
    how = "failed in its first steps: it ended with exit code 3"
    assert all(how in text.replace("\n    ", " ") for text in said)


@pytest.mark.extended("test_shares_follow_speeds_and_the_wire_follows_the_link")
@pytest.mark.timeout(400)
def test_all_machines_hear_why_nothing_is_measured_and_take_the_settings_of_the_first(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import os, torch\n"
        "optimizer = torch.optim.SGD([torch.zeros(1)])\n"
        "for _ in range(12):\n"
        "    optimizer.step()\n"
        "print('ended with', os.environ.get('REDUCTION_WIRE_DTYPE'))\n"
    )
    own = {"REDUCTION_WIRE_DTYPE": "bf16"}
    outputs = outputs_of([str(script)], [str(script)], settings=({}, own))
    first, other = [" ".join(text.split()) for text in outputs]
    why = "late.py made 8 optimizer steps without a model in DistributedDataParallel"
    for text in (first, other):
        assert why in text
        assert "--steps" not in text
        assert "ended with None" in text
    left_out = "REDUCTION_WIRE_DTYPE=bf16, as it is set here, is left out"
    assert (left_out in first, left_out in other) == (False, True)
