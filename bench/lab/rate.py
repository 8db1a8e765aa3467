"""What one TCP stream reaches between two hosts: the yardstick for all-reduces over their links."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import time
from typing import TYPE_CHECKING

from bench.lab.network import LabUnavailable
from worker_client.demo.ranks import free_port

if TYPE_CHECKING:
    from bench.lab.lab import Host

RUNS = 3
# The first second is left out: in it, the shaper's burst comes on top of the rate.
LENGTH = ("-O", "1", "-t", "1")
START_S = 5.0
RUN_S = 30.0


def payload_rate(sender: Host, receiver: Host) -> float:
    """Bytes per second of payload that iperf3 receives, the median of `RUNS` runs.

    Raises:
        LabUnavailable: iperf3 is missing or fails.
    """
    if not shutil.which("iperf3"):
        raise LabUnavailable("the payload rate is measured with iperf3: install the package iperf3")
    port = str(free_port())
    server = receiver.start(
        ["iperf3", "-s", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        client = ["iperf3", "-c", receiver.address, "-p", port, *LENGTH, "-J"]
        return statistics.median(_run(sender, client) for _ in range(RUNS))
    finally:
        server.kill()
        server.wait()


def _run(sender: Host, client: list[str]) -> float:
    deadline = time.monotonic() + START_S
    while True:
        with sender.start(client, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                output, _ = process.communicate(timeout=RUN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise LabUnavailable(f"iperf3 did not end within {RUN_S:g} s") from None
        report = json.loads(output or "{}")
        # With -J its exit status is 0 whatever happens.
        if received := report.get("end", {}).get("sum_received"):
            return float(received["bits_per_second"]) / 8
        # The server may not listen yet, or not have done with the run before.
        if time.monotonic() > deadline:
            raise LabUnavailable(f"iperf3 failed: {report.get('error', 'it said nothing')}")
        time.sleep(0.05)
