"""Collectives that are made of all-reduces: every rank adds its bytes to others' zeros.

They move more bytes than collectives of their own would, and are for what is small or rare: names,
sizes, a model's first weights. All ranks call them in the same order, as they do `all_reduce`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from reducer.errors import ConfigError, MismatchError, RankLostError
from reducer.wire.header import fingerprint
from worker_client.staging.host_buffer import host_buffer

if TYPE_CHECKING:
    from worker_client.client.client import Client

    Bytes = np.ndarray[Any, np.dtype[np.uint8]]

# What a rank asks for: 1, which a rank that is lost does not say; root; fingerprint of the rest.
_ASKED = struct.Struct("<BIQ")


def broadcast(client: Client, data: Any, root: int = 0) -> None:
    """Replace `data` at every rank by what it is at rank `root`, bit for bit.

    Args:
        client: the job's.
        data: NumPy array or torch tensor, of the same dtype and shape at every rank; in place. One
            on a device is waited for.
        root: the rank whose data it is to be, the same at every rank.

    Raises:
        ConfigError: there is no such rank, or `data` is not supported.
        MismatchError: ranks disagree; `data` is as it was.
        RankLostError: the job goes on without that rank.
        ReductionError: as `Client.all_reduce`.
    """
    buffer = host_buffer(data)
    view = np.frombuffer(buffer.view, np.uint8)
    what = f"{buffer.dtype.name.lower()} {tuple(data.shape)}"
    view[:] = broadcast_bytes(client, view, root, what)
    if buffer.write_back is not None:
        buffer.write_back()


def broadcast_bytes(
    client: Client, data: Bytes, root: int, what: str, *, name: str | None = None
) -> Bytes:
    """Return what `data` is at rank `root`.

    Args:
        client: the job's.
        data: as many bytes at every rank.
        root: the rank whose data it is to be.
        what: dtype and shape, in words; ranks must say the same.
        name: the same at every rank, as `Client.all_reduce` takes it.

    Raises:
        ConfigError, MismatchError, RankLostError, ReductionError: as of `broadcast`.
    """
    one = Broadcast(client, data, root, what)
    client.all_reduce(one.sent, "sum", name=name).wait()
    return one.received()


def broadcast_bytes_from_any(
    client: Client, data: Bytes, root: int, what: str
) -> tuple[Bytes, int]:
    """Return what `data` is at a rank, and which: `root`, or if it is lost the first one left.

    The arguments are those of `broadcast_bytes`. Ranks may learn of a loss at different times, and
    then ask for different roots: all of them find that in the same sum, and ask again.

    Raises:
        MismatchError, ReductionError: as `broadcast_bytes`, but for that.
    """
    while True:
        one = Broadcast(client, data, root, what)
        client.all_reduce(one.sent, "sum").wait()
        try:
            return one.received(), root
        except (RankLostError, MismatchError) as error:
            if isinstance(error, MismatchError) and error.field != "root":
                raise
            root = one.present[0]


def check_root(client: Client, root: int) -> None:
    """Refuse what is no rank.

    Raises:
        ConfigError: there is no such rank.
    """
    if not 0 <= root < client.world_size:
        raise ConfigError(f"root {root} is not a rank of a world of size {client.world_size}")


class Broadcast:
    """The bytes of one broadcast: the root's data, and what each rank asked for.

    Args:
        client: the job's.
        data: this rank's, bytes.
        root: the rank whose data it is to be.
        what: dtype and shape, in words.

    Attributes:
        sent: to be summed over all ranks.

    Raises:
        ConfigError: there is no such rank.
    """

    def __init__(self, client: Client, data: Bytes, root: int, what: str) -> None:
        check_root(client, root)
        self._what = what
        asked = np.zeros((client.world_size, _ASKED.size), np.uint8)
        asked[client.rank] = np.frombuffer(_ASKED.pack(1, root, fingerprint(what)), np.uint8)
        mine = data if client.rank == root else np.zeros(data.size, np.uint8)
        self.sent = np.concatenate([mine, asked.reshape(-1)])
        self._size = data.size

    def received(self) -> Bytes:
        """Return the root's data, once `sent` is summed.

        Raises:
            MismatchError: ranks disagree on the root, the dtype or the shape.
            RankLostError: the others go on without the root.
        """
        asked = [(rank, _ASKED.unpack(one)) for rank, one in self._each() if one[0]]
        first, (_, root, what) = asked[0]
        for other, (_, its_root, its_what) in asked:
            if its_root != root:
                raise _mismatch("root", (first, root), (other, its_root))
            if its_what != what:
                mine = "something else"
                known = {fingerprint(self._what): self._what}
                raise _mismatch(
                    "dtype or shape",
                    (first, known.get(what, mine)),
                    (other, known.get(its_what, mine)),
                )
        if root not in self.present:
            raise RankLostError(f"rank {root}, whose data was to be sent, is lost", rank=root)
        return self.sent[: self._size]

    @property
    def present(self) -> list[int]:
        """The ranks that took part, once `sent` is summed: the same at each of them."""
        return [rank for rank, one in self._each() if one[0]]

    def _each(self) -> list[tuple[int, bytes]]:
        rows = self.sent[self._size :].reshape(-1, _ASKED.size)
        return [(rank, one.tobytes()) for rank, one in enumerate(rows)]


def _mismatch(field: str, one: tuple[int, object], other: tuple[int, object]) -> MismatchError:
    return MismatchError.between("broadcast", field, one, other, called=f"the {field}")


def all_gather_bytes(
    client: Client, payload: bytes, *, name: str | None = None
) -> dict[int, bytes]:
    """Return the payload of every rank that takes part, by rank, ascending; lengths may differ.

    Args:
        client: the job's.
        payload: this rank's.
        name: the same at every rank, as `Client.all_reduce` takes it.

    Raises:
        RankLostError: a rank was lost before its payload had come, which every rank finds alike.
        ReductionError: as `Client.all_reduce`.
    """
    one = AllGather(client, payload)
    client.all_reduce(one.asked, "sum", name=name).wait()
    client.all_reduce(one.payloads(), "sum", name=name and f"{name}.payloads").wait()
    return one.received()


class AllGather:
    """The bytes of one all-gather, which takes two sums.

    Args:
        client: the job's.
        payload: this rank's.
        number: this rank's of this all-gather; higher than of an earlier one.

    Attributes:
        asked: to be summed over all ranks first.
    """

    def __init__(self, client: Client, payload: bytes, number: int = 0) -> None:
        # Each payload ends with a byte that is not 0: a rank that is lost leaves zeros.
        self._payload = payload + b"\1"
        self._rank = client.rank
        self.asked = np.zeros(client.world_size + 1, np.int64)
        self.asked[self._rank], self.asked[-1] = len(self._payload), number

    @property
    def number(self) -> int:
        """Number of this all-gather that all ranks know, once `asked` is summed."""
        return int(self.asked[-1])

    def payloads(self) -> Bytes:
        """Return what is to be summed next, once `asked` is."""
        self._sizes = self.asked[:-1]
        self._ends = np.cumsum(self._sizes)
        self._everything = np.zeros(int(self._ends[-1]), np.uint8)
        end = int(self._ends[self._rank])
        mine = np.frombuffer(self._payload, np.uint8)
        self._everything[end - len(self._payload) : end] = mine
        return self._everything

    def received(self) -> dict[int, bytes]:
        """Return the payloads by rank, once they are summed.

        Raises:
            RankLostError: a rank was lost before its payload had come.
        """
        sizes, ends, everything = self._sizes, self._ends, self._everything
        there = np.flatnonzero(sizes).tolist()
        for rank in there:
            if not everything[ends[rank] - 1]:
                raise RankLostError(f"rank {rank} was lost before its data had come", rank=rank)
        return {
            rank: everything[ends[rank] - sizes[rank] : ends[rank] - 1].tobytes() for rank in there
        }
