"""Images built from their Dockerfiles: what is in them, and one job of containers."""

import json
import os
import re
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


def about(image):
    (found,) = json.loads(podman("image", "inspect", image).stdout)
    return found


@pytest.fixture
def lab(base):
    with Lab(hosts=4, mbit=MBIT) as lab:
        yield lab


def test_the_reducers_image_is_small_and_asks_for_no_rights(reducer_image):
    image = about(reducer_image)
    assert image["Size"] < LARGEST_REDUCER
    assert image["Config"]["User"] == "10001:10001"
    assert image["Config"]["Entrypoint"] == ["reducer"]
    assert image["Healthcheck"]["Test"] == ["CMD", "reducer", "health"]
    assert "REDUCTION_HTTP=127.0.0.1:9090" in image["Config"]["Env"]
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


def test_a_reducer_serves_with_no_rights_at_all(lab, reducer_image):
    with contained(
        lab, lab.hosts[0], reducer_image, ["serve"], env=INSECURE, options=LOCKED
    ) as server:
        server.wait_for("reducer ready on ")
        assert server.execute("id", "-u").stdout == "10001\n"
        assert "Read-only file system" in server.execute("touch", "/tmp/x").stderr  # noqa: S108
        assert server.healthy()
        assert server.stop() == 0


def test_health_is_asked_where_probes_are_answered_and_strangers_are_not_served(lab, reducer_image):
    env = {**INSECURE, "REDUCTION_HTTP": "0.0.0.0:9091"}
    with contained(lab, lab.hosts[0], reducer_image, ["serve"], env=env) as server:
        server.wait_for("reducer ready on ")
        assert server.healthy()
    assert run(reducer_image, "health").returncode != 0  # nobody serves there
    with contained(lab, lab.hosts[0], reducer_image, ["serve"], options=LOCKED) as server:
        assert server.wait() == 2
        assert "--insecure" in server.logs()


@pytest.fixture
def keys(tmp_path_factory):
    """Make the keys of a pool and of one job, which the images' users can read, and they alone."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keygen(keys, ["digits"])
    for path in (keys, *keys.rglob("*")):
        os.chown(path, IMAGES_USER, IMAGES_USER)
    return keys


def ready(server, pod):
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
    return server


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


def test_a_rolling_update_of_the_statefulset_costs_no_step(
    lab, reducer_image, worker_image, keys, tmp_path
):
    """With its arguments, its probes and its grace: from the last one to the first, twice."""
    yaml = pytest.importorskip("yaml", reason="needs the extra `manifests`")
    stateful = yaml.safe_load((DOCKER / "kubernetes/pool/statefulset.yaml").read_text())["spec"]
    grace_s = stateful["template"]["spec"]["terminationGracePeriodSeconds"]
    (pod,) = stateful["template"]["spec"]["containers"]
    replicas = stateful["replicas"]
    servers, (first, *others) = lab.hosts[:replicas], lab.hosts[replicas:]
    addresses = ",".join(f"{server.name}:5555" for server in servers)
    torchrun = ["torchrun", f"--nnodes={1 + len(others)}", f"--master-addr={first.name}"]
    tmp_path.chmod(0o755)
    volumes = {TRAIN: "/train.py:ro", tmp_path: "/signals:ro", keys / "jobs/digits": "/keys:ro"}
    env = {"REDUCTION_SERVERS": addresses, "OMP_NUM_THREADS": "1", **KEYS}
    with ExitStack() as stack:

        def serve(ordinal):
            mounted = {"volumes": {keys / "pool": "/keys:ro"}, "options": LOCKED}
            where = lab, servers[ordinal], reducer_image
            started = contained(*where, pod["args"], env=KEYS, **mounted)
            return ready(stack.enter_context(started), pod)

        def train(*arguments):
            started = []
            for rank, host in enumerate((first, *others)):
                command = [*torchrun, f"--node-rank={rank}", "/train.py", *arguments]
                worker = contained(lab, host, worker_image, command, env=env, volumes=volumes)
                started.append(stack.enter_context(worker))
            return started

        pool = [serve(ordinal) for ordinal in range(replicas)]
        workers = train()
        workers[0].wait_for("trained 20 steps")
        for ordinal in [*reversed(range(replicas))] * 2:
            assert pool[ordinal].stop(grace_s) == 0
            pool[ordinal] = serve(ordinal)
        (tmp_path / "stop").touch()
        steps, weights = outcome(workers)[:2]
        assert outcome(train(str(steps))) == (steps, weights, 0)
