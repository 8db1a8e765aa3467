"""Containers on the hosts of a lab, run by podman and runc."""

import subprocess
import time
from contextlib import contextmanager

LOG_S = 120.0
# Limits that this user may set: podman's own are higher than some machines allow. Logs go to files,
# as there may be no journal.
OPTIONS = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4000:4000", "--log-driver=k8s-file"]


class Container:
    """A container that runs, until the end of its `contained` block."""

    def __init__(self, name):
        self.name = name

    def logs(self):
        done = podman("logs", self.name)
        return done.stdout + done.stderr

    def wait_for(self, words):
        """Wait until it has printed these words, and return all that it has printed."""
        deadline = time.monotonic() + LOG_S
        while words not in (text := self.logs()):
            assert time.monotonic() < deadline, f"{self.name} did not say {words!r}:\n{text}"
            assert self.state("Running") == "true", f"{self.name} ended:\n{text}"
            time.sleep(0.2)
        return text

    def state(self, field):
        """Return a field of its state, such as ``Running`` or ``ExitCode``."""
        return podman("inspect", "--format", f"{{{{.State.{field}}}}}", self.name).stdout.strip()

    def execute(self, *argv):
        return podman("exec", self.name, *argv)

    def healthy(self):
        return podman("healthcheck", "run", self.name).returncode == 0

    def stop(self, grace_s=30):
        """Send it SIGTERM, and SIGKILL after a grace; return its exit code."""
        podman("stop", f"--time={grace_s}", self.name)
        return int(self.state("ExitCode"))

    def wait(self):
        return int(podman("wait", self.name).stdout)


@contextmanager
def contained(lab, host, image, argv, *, env=None, volumes=None, options=()):
    """Run an image on a host of a lab, where all hosts' names resolve, as they do in a cluster."""
    name = f"{host.name}-{time.monotonic_ns()}"
    command = ["run", "--detach", f"--name={name}", f"--hostname={host.name}", *OPTIONS, *options]
    command += [f"--network=ns:/run/netns/{host.name}"]
    command += [f"--add-host={other.name}:{other.address}" for other in lab.hosts]
    command += [f"--env={key}={value}" for key, value in (env or {}).items()]
    command += [f"--volume={source}:{target}" for source, target in (volumes or {}).items()]
    try:
        started = podman(*command, image, *argv)
        assert started.returncode == 0, started.stderr
        yield Container(name)
    finally:
        podman("rm", "--force", "--time=0", name)


def run(image, *argv, entrypoint=None):
    """Run an image to its end, without a network."""
    options = [] if entrypoint is None else [f"--entrypoint={entrypoint}"]
    return podman("run", "--rm", "--network=none", *OPTIONS, *options, image, *argv)


def podman(*arguments):
    """Run podman with a runtime that also works where cgroups are of both versions."""
    command = ["podman", "--runtime=runc", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)
