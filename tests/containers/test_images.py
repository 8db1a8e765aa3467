"""Images built from their Dockerfiles: what is in them, and one job of containers."""

import json
import os
import re
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import reducer
from lab import Lab
from reducer.commands.keygen import keygen
from tests.containers.podman import contained, podman, run

pytestmark = pytest.mark.timeout(1200)  # the first of these tests builds an image

TRAIN = Path(__file__).parent / "train.py"
DOCKER = Path(__file__).parent.parent.parent / "docker"
MBIT = 200
LARGEST_REDUCER = 200_000_000
LOCKED = ["--read-only", "--read-only-tmpfs=false", "--cap-drop=all"]
LOCKED += ["--security-opt=no-new-privileges"]
INSECURE = {"REDUCTION_INSECURE": "1"}
KEYS = {"REDUCTION_KEYS": "/keys"}
IMAGES_USER = 10001
USED_BYTES = 1_000_000  # far more than hellos and heartbeats take


def about(image):
    (found,) = json.loads(podman("image", "inspect", image).stdout)
    print(f"\n{image}: {found['Size'] / 1e6:.0f} MB")  # noqa: T201 (with -s)
    return found


@pytest.fixture
def lab(base):
    with Lab(hosts=4, mbit=MBIT) as lab:
        yield lab


# -- what they are --------------------------------------------------------------------------------


def test_the_reducers_image_is_small_and_asks_for_no_rights(reducer_image):
    image = about(reducer_image)
    assert image["Size"] < LARGEST_REDUCER
    assert image["Config"]["User"] == "10001:10001"
    assert image["Config"]["Entrypoint"] == ["reducer"]
    assert image["Healthcheck"]["Test"][0] == "CMD"
    assert image["Labels"]["org.opencontainers.image.version"] == reducer.__version__
    for absent in ("torch", "pip"):
        said = run(reducer_image, "-c", f"import {absent}", entrypoint="python").stderr
        assert f"No module named '{absent}'" in said


def test_the_workers_image_has_torch_and_both_commands(worker_image):
    image = about(worker_image)
    assert image["Config"]["User"] == "10001:10001"
    assert image["Labels"]["org.opencontainers.image.version"] == reducer.__version__
    for command in (["worker-client"], ["reducer", "serve"], ["torchrun"]):
        done = run(worker_image, *command, "--help")
        assert done.returncode == 0, done.stderr


# -- a reducer's container ------------------------------------------------------------------------


def test_a_reducer_serves_with_no_rights_at_all(lab, reducer_image):
    with contained(
        lab, lab.hosts[0], reducer_image, ["serve"], env=INSECURE, options=LOCKED
    ) as server:
        server.wait_for("reducer ready on ")
        assert server.execute("id", "-u").stdout == "10001\n"
        assert "Read-only file system" in server.execute("touch", "/tmp/x").stderr  # noqa: S108
        assert server.healthy()
        assert server.stop() == 0


def test_a_reducer_that_answers_no_probe_is_not_healthy(lab, reducer_image):
    env = {**INSECURE, "REDUCTION_HTTP": "0.0.0.0:9091"}
    with contained(lab, lab.hosts[0], reducer_image, ["serve"], env=env) as server:
        server.wait_for("reducer ready on ")
        assert not server.healthy()


def test_a_reducer_does_not_serve_strangers_unless_it_is_told_to(lab, reducer_image):
    with contained(lab, lab.hosts[0], reducer_image, ["serve"], options=LOCKED) as server:
        assert server.wait() == 2
        assert "--insecure" in server.logs()


# -- a job ----------------------------------------------------------------------------------------


@pytest.fixture
def keys(tmp_path_factory):
    """Make the keys of a pool and of one job, which the images' users can read, and they alone."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keygen(keys, ["digits"])
    for path in (keys, *keys.rglob("*")):
        os.chown(path, IMAGES_USER, IMAGES_USER)
    return keys


class Job:
    """Reducers on the first two hosts of a lab, and workers on the other two, all with keys."""

    def __init__(self, lab, images, signals, keys, stack):
        self._lab, self._signals, self._keys, self._stack = lab, signals, keys, stack
        self._reducer_image, self._worker_image = images
        self.pool = [self.start_reducer(host) for host in lab.hosts[:2]]

    def start_reducer(self, host, argv=("serve",)):
        """Start a reducer's container on a host, and wait until it serves."""
        server = contained(
            self._lab,
            host,
            self._reducer_image,
            argv,
            env=KEYS,
            volumes={self._keys / "pool": "/keys:ro"},
            options=LOCKED,
        )
        started = self._stack.enter_context(server)
        started.wait_for("reducer ready on ")
        return started

    def start_workers(self, *arguments):
        """Start both workers' containers."""
        servers, workers = self._lab.hosts[:2], self._lab.hosts[2:]
        command = ["torchrun", f"--nnodes={len(workers)}", f"--master-addr={workers[0].name}"]
        env = {
            "REDUCTION_SERVERS": ",".join(f"{server.name}:5555" for server in servers),
            "OMP_NUM_THREADS": "1",
            **KEYS,
        }
        volumes = {
            TRAIN: "/train.py:ro",
            self._signals: "/signals:ro",
            self._keys / "jobs/digits": "/keys:ro",
        }
        return [
            self._stack.enter_context(
                contained(
                    self._lab,
                    host,
                    self._worker_image,
                    [*command, f"--node-rank={rank}", "/train.py", *arguments],
                    env=env,
                    volumes=volumes,
                )
            )
            for rank, host in enumerate(workers)
        ]


def outcome(workers):
    """Wait for the end of a training; return its steps, its weights, and reducers lost."""
    said = set()
    for worker in workers:
        code, logs = worker.wait(), worker.logs()
        assert code == 0, logs
        match = re.search(r"rank \d of 2 on \S+: (\d+) steps, (\w+), (\d+) lost", logs)
        assert match, logs
        said.add((int(match[1]), match[2], int(match[3])))
    assert len(said) == 1, said
    return said.pop()


def received(host):
    """Return the bytes that a host's network card has received."""
    command = ["ip", "-n", host.name, "-j", "-s", "link", "show", "eth0"]
    (card,) = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return int(card["stats64"]["rx"]["bytes"])


@pytest.fixture
def job(lab, reducer_image, worker_image, tmp_path, keys):
    with ExitStack() as stack:
        yield Job(lab, (reducer_image, worker_image), tmp_path, keys, stack)


def test_a_reducers_container_is_killed_and_replaced_while_others_train(job, lab, tmp_path):
    tmp_path.chmod(0o755)
    host = lab.hosts[0]
    workers = job.start_workers()
    workers[0].wait_for("trained 20 steps")
    job.pool[0].kill()
    replacement = job.start_reducer(host)
    before = received(host)
    while received(host) < before + USED_BYTES:
        assert workers[0].state("Running") == "true", workers[0].logs()
        time.sleep(0.2)
    (tmp_path / "stop").touch()
    steps, weights, lost = outcome(workers)
    assert lost == 1
    assert replacement.stop() == 0
    print(f"\n{steps} steps, a reducer killed and replaced: weights {weights}")  # noqa: T201

    job.pool[0] = job.start_reducer(host)
    assert outcome(job.start_workers(str(steps))) == (steps, weights, 0)


def wait_until_ready(server, pod):
    """Probe a reducer as a kubelet does: first whether it has started, then whether it is ready."""
    ports = {port["name"]: port["containerPort"] for port in pod["ports"]}
    for name in ("startupProbe", "readinessProbe"):
        probe = pod[name]
        url = f"http://127.0.0.1:{ports[probe['httpGet']['port']]}{probe['httpGet']['path']}"
        ask = f"from urllib.request import urlopen; urlopen({url!r}, timeout=1)"
        for _ in range(probe.get("failureThreshold", 3)):
            if not server.execute("python", "-c", ask).returncode:
                break
            time.sleep(probe["periodSeconds"])
        else:
            pytest.fail(f"{name}: {server.logs()}")


def test_a_rolling_update_of_the_statefulset_costs_no_step(job, lab, tmp_path):
    """With its arguments, its probes and its grace: from the last one to the first, twice."""
    yaml = pytest.importorskip("yaml", reason="needs the extra `manifests`")
    stateful = yaml.safe_load((DOCKER / "kubernetes/pool/statefulset.yaml").read_text())["spec"]
    grace_s = stateful["template"]["spec"]["terminationGracePeriodSeconds"]
    (pod,) = stateful["template"]["spec"]["containers"]
    replicas = range(stateful["replicas"])
    tmp_path.chmod(0o755)
    for ordinal in replicas:
        assert job.pool[ordinal].stop() == 0
        job.pool[ordinal] = job.start_reducer(lab.hosts[ordinal], pod["args"])
        wait_until_ready(job.pool[ordinal], pod)
    workers = job.start_workers()
    workers[0].wait_for("trained 20 steps")
    for ordinal in [*reversed(replicas)] * 2:
        assert job.pool[ordinal].stop(grace_s) == 0
        job.pool[ordinal] = job.start_reducer(lab.hosts[ordinal], pod["args"])
        wait_until_ready(job.pool[ordinal], pod)
    (tmp_path / "stop").touch()
    steps, weights = outcome(workers)[:2]
    assert outcome(job.start_workers(str(steps))) == (steps, weights, 0)
