"""The services of `docker/compose.yaml` as podman runs them, each on a host of its own.

It does what an engine for Compose does with the keys that the file has, in the order that its
`depends_on` asks for.
"""

import time
from contextlib import ExitStack

import pytest

from lab import Lab
from tests.containers.images import ROOT
from tests.containers.podman import contained
from tests.pages import FINGERPRINT

pytestmark = pytest.mark.timeout(1200)  # it may have to build the images

READY_S = 60.0
KNOWN = {"build", "cap_drop", "command", "depends_on", "environment", "healthcheck", "hostname"}
KNOWN |= {"image", "networks", "read_only", "security_opt", "stop_grace_period", "tmpfs", "volumes"}


def options(service):
    """Return what podman calls a service's rights, and its time to stop."""
    said = ["--read-only", "--read-only-tmpfs=false"] if service.get("read_only") else []
    said += [f"--cap-drop={right.lower()}" for right in service.get("cap_drop", ())]
    said += [f"--tmpfs={folder}" for folder in service.get("tmpfs", ())]
    if grace := service.get("stop_grace_period"):
        said.append(f"--stop-timeout={grace.removesuffix('s')}")
    return said + [f"--security-opt={option}" for option in service.get("security_opt", ())]


def volumes(service):
    pairs = (volume.split(":", 1) for volume in service.get("volumes", ()))
    return {(ROOT / "docker" / source).resolve(): target for source, target in pairs}


def wait_until_healthy(container, check):
    kind, *command = check["test"]
    assert kind == "CMD"
    deadline = time.monotonic() + READY_S
    while container.execute(*command).returncode:
        assert time.monotonic() < deadline, container.logs()
        time.sleep(0.5)


def test_the_services_train_together(base, reducer_image, worker_image):
    yaml = pytest.importorskip("yaml", reason="needs the extra `manifests`")
    project = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())
    # Without a profile: the others watch these, and are images of others.
    services = {
        name: service for name, service in project["services"].items() if "profiles" not in service
    }
    images = {"reducer": reducer_image, "worker": worker_image}
    # Those that others depend on are first.
    order = sorted(services, key=lambda name: "depends_on" in services[name])
    with Lab(hosts=len(services)) as lab, ExitStack() as stack:
        hosts = dict(zip(order, lab.hosts, strict=True))
        names = [f"--add-host={name}:{host.address}" for name, host in hosts.items()]
        running = {}
        for name in order:
            service = services[name]
            assert set(service) <= KNOWN
            assert service["hostname"] == name
            for needed, how in service.get("depends_on", {}).items():
                assert how == {"condition": "service_healthy"}
                wait_until_healthy(running[needed], services[needed]["healthcheck"])
            running[name] = stack.enter_context(
                contained(
                    lab,
                    hosts[name],
                    images[service["image"]],
                    service["command"],
                    env=service.get("environment"),
                    volumes=volumes(service),
                    options=[*options(service), *names],
                )
            )
        workers = [running[name] for name in order if name.startswith("worker")]
        assert [worker.wait() for worker in workers] == [0, 0], [each.logs() for each in workers]
        said = FINGERPRINT.findall("".join(worker.logs() for worker in workers))
        ranks, _, weights, servers = zip(*said, strict=True)
        assert sorted(ranks) == ["0", "1"]
        assert set(servers) == {"2"}
        assert len(set(weights)) == 1
