"""Packets that a host loses: by chance, or all to or from another host.

The rules are nftables' own, in the host's namespace: nothing but its traffic passes them, and they
vanish with it. A cable that is pulled is `Lab.link_down`'s matter.
"""

import shutil
from subprocess import PIPE, STDOUT
from typing import Literal, TypeAlias

from lab.lab import Host
from lab.network import COMMAND_S, LabUnavailable

Way: TypeAlias = Literal["in", "out", "both"]

# Loopback, which a host has to itself, loses nothing.
_CHAINS = """
add table ip faults
add chain ip faults in {{ type filter hook input priority 0; }}
add chain ip faults out {{ type filter hook output priority 0; }}
flush table ip faults
add rule ip faults in iifname "lo" accept
add rule ip faults out oifname "lo" accept
{rules}
"""


def lose(host: Host, percent: int) -> None:
    """Let a host lose so many percent of the packets that it receives, and of those it sends.

    A packet is what the host's TCP hands down at once, up to 64 KiB: so it loses them in bursts.
    """
    rule = f"numgen random mod 100 < {percent} drop"
    _load(host, [f"in {rule}", f"out {rule}"])


def part(host: Host, other: Host, way: Way = "both") -> None:
    """Let a host lose all packets from another one (``in``), to it (``out``), or both."""
    rules = {"in": f"in ip saddr {other.address} drop", "out": f"out ip daddr {other.address} drop"}
    _load(host, [rule for name, rule in rules.items() if way in {name, "both"}])


def heal(host: Host) -> None:
    _load(host, [])


def _load(host: Host, rules: list[str]) -> None:
    if not shutil.which("nft"):
        raise LabUnavailable("packets are lost by `nft`, which is missing: install nftables")
    text = _CHAINS.format(rules="\n".join(f"add rule ip faults {rule}" for rule in rules))
    with host.start(["nft", "-f", "-"], stdin=PIPE, stdout=PIPE, stderr=STDOUT) as process:
        said, _ = process.communicate(text, COMMAND_S)
    if process.returncode:
        raise LabUnavailable(f"the kernel or `nft` refuses rules that lose packets: {said.strip()}")
