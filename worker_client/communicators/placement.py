"""Which ranks share a node, and what every rank is there."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from reducer.wire.messages import MAX_SETTING_BYTES, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class NodePlace(NamedTuple):
    """Where a rank stands among nodes that have equally many ranks."""

    nodes: tuple[tuple[int, ...], ...]  # the ranks of each, ascending; by their first ranks
    node: int  # index of this rank's
    local_rank: int  # index of this rank among those of its node

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks of this node, this one included."""
        return self.nodes[self.node]

    @property
    def across(self) -> tuple[int, ...]:
        """Ranks that have this one's local rank, one of each node."""
        return tuple(ranks[self.local_rank] for ranks in self.nodes)

    def ranks_of(self, nodes: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks of some nodes, ascending."""
        return tuple(sorted(rank for node in nodes for rank in self.nodes[node]))


def arrange(keys: Sequence[str], rank: int) -> NodePlace | None:
    """Return the place of a rank, where those whose nodes have the same key are together.

    None if there are fewer than two nodes, or nodes of one rank, or of different numbers of ranks.
    """
    found: dict[str, list[int]] = {}
    for at, key in enumerate(keys):
        found.setdefault(key, []).append(at)
    nodes = tuple(tuple(ranks) for ranks in found.values())
    sizes = {len(ranks) for ranks in nodes}
    if len(nodes) < 2 or len(sizes) > 1 or sizes == {1}:
        return None
    node = list(found).index(keys[rank])
    return NodePlace(nodes, node, nodes[node].index(rank))


def host_name() -> str:
    """Return what people call this host, cut to what a HELLO takes."""
    return printable(socket.gethostname()).encode()[:MAX_SETTING_BYTES].decode(errors="ignore")


def host_identity() -> str:
    """Return what tells this host from others of a job."""
    # Machines made from one image have the same names and numbers, but boot for themselves.
    booted, inode = "", 0  # some systems and sandboxes hide them
    with suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Containers on one machine have network namespaces, and so loopbacks, of their own.
    with suppress(OSError):
        inode = Path("/proc/self/ns/net").stat().st_ino
    return f"{socket.gethostname()}/{booted}/{inode}"
