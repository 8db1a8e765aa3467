"""Launchers for tests: a small SLURM of this user's own, and an environment without any."""

import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import free_ports, run_command
from tests.conftest import NAMES, PREFIXES
from tests.lab.conftest import namespaces  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[2]
SLURM_TOOLS = ("slurmctld", "slurmd", "srun", "scontrol", "sinfo")
NODES = ("127.0.0.1", "127.0.0.2")  # hosts of SLURM that need no name server
START_S = 60.0


def bare_environment(**settings):
    """Return this process's environment without what a launcher says, and with these."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(PREFIXES) and name not in NAMES
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **settings}


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Return what srun needs in its environment to reach a SLURM of two nodes on this machine."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for a SLURM of its own")
    for tool in SLURM_TOOLS:
        if not shutil.which(tool):
            pytest.skip(f"needs `{tool}`: make test-tools")
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "state").mkdir()
    controller, first, second = free_ports(3)
    settings = folder / "slurm.conf"
    ports = {"controller": controller, "first": first, "second": second}
    text = Path(__file__).with_name("slurm.conf").read_text()
    host = socket.gethostname().partition(".")[0]
    settings.write_text(text.format(host=host, folder=folder, **ports))
    environment = {"SLURM_CONF": str(settings)}
    commands = [["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in NODES)]
    with (folder / "log").open("wb") as log:
        apart = {"stdout": log, "stderr": log, "start_new_session": True}
        daemons = [
            subprocess.Popen(command, env=bare_environment(**environment), **apart)
            for command in commands
        ]
        try:
            _wait_for_nodes(environment, daemons, folder / "log")
            yield environment
        finally:
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in daemons:
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(10)
                daemon.kill()
                daemon.wait()


def _wait_for_nodes(environment, daemons, log):
    until = time.monotonic() + START_S
    while time.monotonic() < until and all(daemon.poll() is None for daemon in daemons):
        command = ("sinfo", "--noheader", "--states=idle", "--format=%D")
        asked = run_command(*command, env=bare_environment(**environment))
        if asked.stdout.strip() == str(len(NODES)):
            return
        time.sleep(0.2)
    pytest.fail(f"SLURM did not start: {log.read_text()[-2000:]}")
