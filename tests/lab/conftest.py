"""Labs for tests, and what the lab itself must not be asked about: whether this machine can."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from lab import Lab

TRANSFER = [sys.executable, "-S", str(Path(__file__).with_name("transfer.py"))]
PAYLOAD = 0.957  # of a link's rate: 1448 bytes in each Ethernet frame of 1514


@pytest.fixture(scope="session")
def namespaces():
    """Skip where no lab can be; a lab that fails elsewhere is a failed test."""
    if os.geteuid() != 0:
        pytest.skip("needs root, for network namespaces")
    for tool in ("ip", "tc", "unshare"):
        if not shutil.which(tool):
            pytest.skip(f"needs `{tool}`: make test-tools")
    if subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode:
        pytest.skip("the kernel refuses namespaces")


@pytest.fixture(scope="module")
def lab(namespaces):
    """Three hosts at 100 Mbit/s, shared by a module's tests; they leave its links as they were."""
    with Lab(hosts=3, mbit=100) as shared:
        yield shared


def own_keeper():
    """The process that keeps the lab that this one has made last."""
    return [child for child in psutil.Process().children() if "keep" in child.cmdline()][-1]


def line(process):
    return process.stdout.readline().strip()


def answers(asking, answering, lines, *, name=""):
    """Return what comes of lines, by address or name, with the seconds that each has taken."""
    with answering.start([*TRANSFER, "echo"], stdout=PIPE) as echo:
        ask = [*TRANSFER, "ask", name or answering.address, line(echo)]
        client = asking.start(ask, stdin=PIPE, stdout=PIPE)
        said, _ = client.communicate("".join(f"{each}\n" for each in lines), timeout=20)
        assert echo.wait(20) == 0
    return [(word, float(seconds)) for word, seconds in map(str.split, said.splitlines())]


def arrivals(sender, receiver, datagrams=1):
    """Return how many of some datagrams arrive."""
    with receiver.start([*TRANSFER, "count"], stdin=PIPE, stdout=PIPE) as counting:
        flood = [*TRANSFER, "flood", receiver.address, line(counting), str(datagrams)]
        assert sender.start(flood).wait(20) == 0
        return int(counting.communicate(timeout=10)[0])
