"""Several hosts on this one machine, for benchmarks and tests.

Each host is a network namespace with one network card, ``eth0``. A bridge joins them; it has a
namespace of its own, so no packet leaves the lab and the machine's own network is not touched.
Links are shaped in both directions, and what runs in a host is an ordinary process::

    with Lab(hosts=8, mbit=400) as lab:
        server = lab.hosts[0].start(["iperf3", "-s"])
        client = lab.hosts[1].start(["iperf3", "-c", lab.hosts[0].address])

``python -m lab`` runs a command in a lab, lists the labs there are, and removes what dead
ones left.
"""

from lab.lab import Host, Lab
from lab.network import LabUnavailable

__all__ = ["Host", "Lab", "LabUnavailable"]
