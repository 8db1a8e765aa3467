"""The leaves of a step: whose each is, and of which subtrees a rank's contribution is made.

The rules are those of `docs/protocol.md`, section 4; `leaves.h` is the twin in C.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from reducer.errors import LocalProtocolError, RemoteProtocolError
from reducer.wire.constants import DType
from reducer.wire.header import check_chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reducer.wire.header import Buffer, Header

MAX_LEAVES = 1 << 16
_LARGEST_ELEMENT = 8  # bytes


def dealt(leaves: int, world_size: int, rank: int) -> range:
    """Return the leaves of a rank: consecutive, and one more at most than another rank's."""
    each, more = divmod(leaves, world_size)
    first = rank * each + min(rank, more)
    return range(first, first + each + (rank < more))


def subtree_end(leaves: int, first: int, last: int) -> int:
    """Return the end of the largest subtree that begins at `first` and has no leaf from `last` on.

    What the tree lacks beyond its last leaf is missing to no subtree.
    """
    size = first & -first or 1 << (leaves - 1).bit_length()
    if last == leaves and first + size >= leaves:
        return leaves
    while first + size > last:
        size >>= 1
    return first + size


@lru_cache(maxsize=4096)
def parts(leaves: int, world_size: int, rank: int) -> tuple[range, ...]:
    """Return the subtrees of a rank's contribution, each as its leaves, in their order."""
    found, own = [], dealt(leaves, world_size, rank)
    first = own.start
    while first < own.stop:
        end = subtree_end(leaves, first, own.stop)
        found.append(range(first, end))
        first = end
    return tuple(found)


@lru_cache(maxsize=256)
def most_parts(leaves: int, world_size: int) -> int:
    """Return of how many subtrees a contribution is made at most; 0 if a rank has no leaf."""
    if not world_size <= leaves <= MAX_LEAVES:
        return 0
    return max(len(parts(leaves, world_size, rank)) for rank in range(world_size))


@dataclass(frozen=True)
class Share:
    """What a rank has of the leaves of a step.

    Attributes:
        count: leaves of the step, at all ranks together.
        present: ranks that take part, ascending: the membership among which they were dealt.
        place: of this rank among them.
    """

    count: int
    present: tuple[int, ...]
    place: int

    @property
    def numbers(self) -> range:
        """The leaves of this rank."""
        return dealt(self.count, len(self.present), self.place)

    @property
    def parts(self) -> tuple[range, ...]:
        """The subtrees that it contributes, each as its leaves."""
        return parts(self.count, len(self.present), self.place)

    @property
    def most_parts(self) -> int:
        """Of how many subtrees a rank's contribution is made at most."""
        return most_parts(self.count, len(self.present))

    def chunk_bytes(self, usual: int) -> int:
        """Return the size of chunks of which a contribution with all subtrees is not larger."""
        return max(usual >> (self.most_parts - 1).bit_length(), _LARGEST_ELEMENT)

    @property
    def least_chunk_bytes(self) -> int:
        """Bytes that a usual chunk must have, so that there is one for all subtrees."""
        return _LARGEST_ELEMENT << (self.most_parts - 1).bit_length()


def split(contributions: Sequence[Buffer], nbytes: int, count: int) -> list[Buffer]:
    """Return the `count` subtrees of `nbytes` each that contributions have."""
    if nbytes == 0:
        return [b""] * count
    return [
        memoryview(contribution)[at : at + nbytes]
        for contribution in contributions
        for at in range(0, len(contribution), nbytes)
    ]


def check_contribution(
    header: Header, payload_bytes: int, world_size: int, max_chunk_bytes: int
) -> None:
    """Check the fields of a CONTRIBUTION about elements, and about leaves if it has any.

    Raises:
        RemoteProtocolError: a field is out of bounds or contradicts another one.
    """
    leaves = header.window
    check_chunk(header, header.nbytes if leaves else payload_bytes, max_chunk_bytes)
    if not leaves:
        return
    if not world_size <= leaves <= MAX_LEAVES:
        raise RemoteProtocolError(f"{leaves} leaves of {world_size} ranks")
    if DType(header.dtype).is_block:
        raise RemoteProtocolError("there are no leaves of blocks")
    count = len(parts(leaves, world_size, header.rank))
    if payload_bytes != count * header.nbytes:
        raise RemoteProtocolError(
            f"announced {count} times {header.nbytes} bytes, got {payload_bytes}"
        )
    if payload_bytes > max_chunk_bytes:
        raise RemoteProtocolError(f"a chunk has at most {max_chunk_bytes} bytes")


@lru_cache(maxsize=256)
def depths_of(ends: tuple[int, ...], inputs: int) -> bytes:
    """Return how many nodes a fold of subtrees has left after each (`reducer/kernels/fold.h`).

    Raises:
        LocalProtocolError: these are not the subtrees of a tree, one after another.
    """
    leaves, first = (ends[-1] if ends else 0), 0
    if len(ends) != inputs or not 0 < leaves <= MAX_LEAVES:
        raise LocalProtocolError(f"{inputs} subtrees need as many ends, got {ends!r:.80}")
    for end in ends:
        if not first < end <= leaves or subtree_end(leaves, first, end) != end:
            raise LocalProtocolError(f"leaves {first} to {end - 1} of {leaves} are no subtree")
        first = end
    return bytes(1 if end == leaves else end.bit_count() for end in ends)
