"""What the ranks tell each other of the tensors that they have for reduction (sans I/O).

Ranks submit named tensors in any order and at different times, but all-reduces must be the same
calls in the same order everywhere. So in rounds every rank says which tensors it has, and those
that all ranks have are reduced, in an order that all derive from the same bytes. A tensor is
announced once, with its name, dtype, reduction, size and shape; from then on it is a bit at the
index that all ranks gave it. Calls of one name are counted, so that nothing is mixed up after a
failure: the bit says that a rank has the call that is next. A call that a rank gives up, as it was
refused, is announced as well, with the reason: it fails at the others.

Names that never recur would fill the memory with their counts, so counts begin anew at times: all
ranks subtract the same bases. One round alone cannot make them do so, as it may end well at some
ranks and fail at others. When the first rank counts calls of too many names, it announces its
counts as bases. A rank that has heard them has another `state`, so the next round ends well only if
all ranks have. A rank at which it ends well subtracts them, and its age grows by one. A rank at
which it fails has heard them as well: it subtracts them when a round shows it that another rank is
older. Such a round is void, as one number does not mean the same call at all ranks, and nothing
else is agreed on until all are of one age again.

A round is one sum of bytes, in which every rank has a section of its own, and zeros elsewhere:

    1 byte    1, unless the rank takes no part
    1 byte    its age, modulo 256
    4 bytes   length of its announcements, little-endian
    T/8 bytes which of the T known tensors it has, a bit each

and, if anybody announces something, a second sum with all announcements, JSON, in rank order: a
list for each tensor ([name, dtype, op, bytes, exact, call], and its shape, if the caller gave one,
which is any text), each call given up
([name, call, reason, ranks that it was for in vain or null]), and bases ([{name: calls}]).
"""

from __future__ import annotations

import json
import struct
import zlib
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from reducer.errors import MismatchError, ReductionTimeout
from reducer.wire.constants import DType, ReduceOp
from worker_client.protocol.operation import refused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from reducer.errors import ReductionError

JOIN = "worker_client.join"  # the tensor that is complete only when no rank has anything else
# Beyond so many tensors all ranks forget them, and announce again what they have; beyond so many
# names whose calls are counted, counts begin anew.
MOST_KNOWN = 8192

_HEAD = struct.Struct("<BBI")
_AGES = 256  # that a byte tells apart; those of two ranks differ by one at most
_LEAST = 6  # parts of a tensor's announcement


class Tensor(NamedTuple):
    """What must be equal at all ranks for a tensor to be reduced.

    Attributes:
        shape: what its caller calls so; empty if it does not matter.
    """

    name: str
    dtype: DType
    op: ReduceOp
    nbytes: int
    exact: bool = False
    shape: str = ""


class Key(NamedTuple):
    """One reduction of a tensor.

    Attributes:
        call: how many calls of this name there were before, beyond the base that all ranks have.
    """

    tensor: Tensor
    call: int


class GivenUp(NamedTuple):
    """A call of a name that this rank does not make.

    Attributes:
        call: as of `Key`.
        why: the reason, for the other ranks.
        missing: if it has waited for the call in vain, the ranks that it has waited for.
    """

    name: str
    call: int
    why: str
    missing: tuple[int, ...] | None = None

    def error_of(self, rank: int) -> ReductionError:
        """Return what the call ends with where others make it, if `rank` gives it up."""
        if self.missing is None:
            return refused(rank, self.why)
        return ReductionTimeout(f"rank {rank} waits no longer: {self.why}", missing=self.missing)


class Asked(Protocol):
    """One reduction that this rank is asked for."""

    @property
    def tensor(self) -> Tensor:
        """Of what."""

    @property
    def call(self) -> int:
        """As of `Key`."""


class RoundDecision(NamedTuple):
    """What a round has shown; the same at every rank, but for the bases.

    Attributes:
        ready: tensors that every rank has, in the order in which to reduce them.
        mismatched: what ranks have under one name with different properties, and why; of different
            calls only the earlier one, which has failed or was forgotten elsewhere.
        given_up: calls that a rank does not make, by name and call, and why.
        bases: what is to be subtracted from this rank's counts, by name; mostly empty. Ranks that
            do not subtract it with this round have done so before, or will.
        void: whether ranks count from different bases: what they have said is to be said again.
    """

    ready: list[Tensor]
    mismatched: dict[Key, MismatchError]
    given_up: dict[tuple[str, int], ReductionError]
    bases: Mapping[str, int]
    void: bool = False


class Negotiation:
    """One rank's part in the rounds.

    A round is `ask`, a sum over all ranks of what it returns, `decode`, for announcements another
    sum, and `decide`. If any of this fails, `reset`: other ranks may have heard more or less.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._age = 0
        self._ages = {0}  # of the ranks in the latest round
        self._bases: Mapping[str, int] = {}  # announced last, and not subtracted
        self._present = list(range(world_size))
        self._said = b""
        self._ends: list[int] = []
        self._lengths: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget all that ranks have announced."""
        self._forget_tensors()
        self._based = False  # whether `state` says that this rank has heard `_bases`
        self.state = 0
        """A checksum of what is known: ranks whose sums differ in it cannot go on together."""

    def _forget_tensors(self) -> None:
        self._known: list[Tensor | None] = []
        self._calls: list[int] = []  # which call of each a bit means
        self._indices: dict[Tensor, dict[int, int]] = {}  # by call: mostly one of each tensor
        self._joins: list[int] = []  # indices of JOIN

    def ask(
        self,
        mine: Iterable[Asked],
        given_up: Iterable[GivenUp] = (),
        counts: Mapping[str, int] = MappingProxyType({}),
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Begin a round; return what is to be summed, uint8.

        Args:
            mine: the tensors that this rank has, no two of a name.
            given_up: the calls that this rank does not make, and has not announced as such.
            counts: how many calls of each name this rank has made, or given up.
        """
        has = bytearray(len(self._known))
        indices = self._indices
        news: list[tuple[object, ...]] = list(given_up)
        for asked in mine:
            try:
                has[indices[asked.tensor][asked.call]] = 1
            except KeyError:
                *what, shape = asked.tensor
                news.append((*what, asked.call, shape) if shape else (*what, asked.call))
        first = self._present[0] == self._rank  # of the latest round: one is enough
        if first and len(counts) > MOST_KNOWN and not self._based:
            news.append((dict(counts),))  # a copy, as threads go on to count
        self._said = json.dumps(news, separators=(",", ":")).encode() if news else b""
        bits = np.packbits(np.frombuffer(has, np.uint8))
        section = _HEAD.pack(1, self._age, len(self._said)) + bits.tobytes()
        buffer = np.zeros((self._world_size, len(section)), np.uint8)
        buffer[self._rank] = np.frombuffer(section, np.uint8)
        self._sections = buffer
        return buffer.reshape(-1)

    def decode(self) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
        """Read the sum; return what is to be summed now, uint8, if ranks announce something."""
        heads = [_HEAD.unpack_from(section.tobytes()) for section in self._sections]
        self._present = [rank for rank, (present, *_) in enumerate(heads) if present]
        self._ages = {heads[rank][1] for rank in self._present}
        self._lengths = [length for *_, length in heads]
        self._ends = np.cumsum(self._lengths).tolist()
        total = self._ends[-1]
        self._announced = np.zeros(total, np.uint8)
        if not total or len(self._ages) > 1:
            return None
        end = self._ends[self._rank]
        self._announced[end - len(self._said) : end] = np.frombuffer(self._said, np.uint8)
        return self._announced

    def decide(self) -> RoundDecision:
        """End the round with all announcements."""
        if len(self._ages) > 1:
            younger = (self._age + 1) % _AGES in self._ages
            return RoundDecision([], {}, {}, self._grow_older() if younger else {}, void=True)
        confirmed = self._based
        # Who was lost between the two sums has announced nothing in the second one.
        self._present = [rank for rank in self._present if self._has_announced(rank)]
        announced: dict[int, list[Key]] = {}
        given_up: dict[tuple[str, int], ReductionError] = {}
        for rank in self._present:
            announced[rank], theirs, bases = self._announcements(rank)
            for one in theirs:
                given_up.setdefault((one.name, one.call), one.error_of(rank))
                self._note(f"without {one.name} {one.call}")
            if bases:  # who has heard some announces none before they are confirmed
                self._bases, self._based = bases, True
                self._note("bases")
        bits = self._sections[:, _HEAD.size :]
        known = np.unpackbits(bits, axis=1, count=len(self._known))[self._present].astype(bool)
        for key in chain.from_iterable(announced.values()):
            self._learn(key)
        has = np.zeros((len(self._present), len(self._known)), bool)
        has[:, : known.shape[1]] = known
        for row, rank in enumerate(self._present):
            has[row, [self._indices[key.tensor][key.call] for key in announced[rank]]] = True
        complete = np.logical_and.reduce(has, axis=0)
        if self._joins and (has.any(axis=0) & ~complete).any():
            complete[self._joins] = False
        self._has = has
        mismatched = {
            key: error
            for key, error in self._mismatches(has, complete)
            if (key.tensor.name, key.call) not in given_up
        }
        ready = self._go_on(np.flatnonzero(complete).tolist())
        for key in mismatched:
            self._forget(key)
        if confirmed or len(self._known) > MOST_KNOWN:
            self._forget_tensors()
        return RoundDecision(ready, mismatched, given_up, self._grow_older() if confirmed else {})

    def _grow_older(self) -> Mapping[str, int]:
        """Return the bases, which all ranks have heard."""
        bases, self._bases, self._based = self._bases, {}, False
        self._age = (self._age + 1) % _AGES
        return bases

    def missing_ranks(self, key: Key) -> tuple[int, ...]:
        """Return the ranks that did not have a tensor of this rank in the latest round."""
        index = self._indices.get(key.tensor, {}).get(key.call)
        if index is None:
            return ()
        has = self._has[:, index].tolist()
        return tuple(rank for rank, it_has in zip(self._present, has, strict=True) if not it_has)

    def wanted(self) -> list[Key]:
        """Return what other ranks had in the latest round, and this one had not."""
        others = self._has.any(axis=0) & ~self._has[self._present.index(self._rank)]
        return [self._key(at) for at in np.flatnonzero(others).tolist() if self._is_known(at)]

    def _is_known(self, index: int) -> bool:
        return index < len(self._known) and self._known[index] is not None

    def _has_announced(self, rank: int) -> bool:
        length = self._lengths[rank]
        return not length or bool(self._announced[self._ends[rank] - length])

    def _announcements(self, rank: int) -> tuple[list[Key], list[GivenUp], dict[str, int]]:
        """Return what a rank announces: tensors, the calls that it gives up, and bases."""
        end, length = self._ends[rank], self._lengths[rank]
        said = json.loads(self._announced[end - length : end].tobytes()) if length else []
        keys = [
            Key(Tensor(name, DType(dtype), ReduceOp(op), nbytes, exact, *shape), call)
            for name, dtype, op, nbytes, exact, call, *shape in (
                one for one in said if len(one) >= _LEAST
            )
        ]
        given_up = [
            GivenUp(name, call, why, None if missing is None else tuple(missing))
            for name, call, why, missing in (
                one for one in said if len(one) == len(GivenUp._fields)
            )
        ]
        return keys, given_up, next((one[0] for one in said if len(one) == 1), {})

    def _learn(self, key: Key) -> None:
        (name, dtype, op, nbytes, exact, shape), call = key
        calls = self._indices.setdefault(key.tensor, {})
        if call in calls:
            return
        if name == JOIN:
            self._joins.append(len(self._known))
        calls[call] = len(self._known)
        self._known.append(key.tensor)
        self._calls.append(call)
        self._note(f"{name} {dtype:d} {op:d} {nbytes} {exact:d} {call}{shape}")

    def _go_on(self, complete: list[int]) -> list[Tensor]:
        """Let each of these bits mean the next call of its tensor; return the tensors."""
        ready: list[Tensor] = []
        for index in complete:
            tensor, call = self._known[index], self._calls[index]
            assert tensor is not None, "nobody has what all have forgotten"
            ready.append(tensor)
            calls = self._indices[tensor]
            del calls[call]
            # Some rank may have announced that already, as it has failed to make this one before.
            if calls.setdefault(call + 1, index) == index:
                self._calls[index] = call + 1
            else:
                self._known[index] = None
        self.state += len(ready)
        return ready

    def _forget(self, key: Key) -> None:
        calls = self._indices[key.tensor]
        self._known[calls.pop(key.call)] = None
        if not calls:
            del self._indices[key.tensor]
        self._note(f"not {key.tensor.name} {key.call}")

    def _note(self, what: str) -> None:
        # A name that is refused may be no text: half a character, say.
        self.state = zlib.crc32(what.encode(errors="surrogatepass"), self.state & 0xFFFFFFFF)

    def _mismatches(
        self, has: np.ndarray[Any, np.dtype[np.bool_]], complete: np.ndarray[Any, Any]
    ) -> Iterator[tuple[Key, MismatchError]]:
        """Find names under which every rank has something, but not all the same."""
        by_name: dict[str, list[int]] = {}
        for index in np.flatnonzero(np.logical_or.reduce(has, axis=0) & ~complete).tolist():
            by_name.setdefault(self._key(index).tensor.name, []).append(index)
        for indices in by_name.values():
            if len(indices) == 1 or not (columns := has[:, indices]).any(axis=1).all():
                continue  # it may be a matter of time
            keys = [self._key(indices[which]) for which in columns.argmax(axis=1).tolist()]
            other = next(row for row, key in enumerate(keys) if key != keys[0])
            error = _mismatch(keys[0], self._present[0], keys[other], self._present[other])
            last = max(key.call for key in keys)
            for key in dict.fromkeys(keys):
                if error.field != "call" or key.call < last:
                    yield key, error

    def _key(self, index: int) -> Key:
        tensor = self._known[index]
        assert tensor is not None, "nobody has what all have forgotten"
        return Key(tensor, self._calls[index])


def _mismatch(expected: Key, rank: int, got: Key, other_rank: int) -> MismatchError:
    one, other = ({"call": key.call, **key.tensor._asdict()} for key in (expected, got))
    fields = ("call", "dtype", "op", "nbytes", "exact", "shape")
    field = next(name for name in fields if one[name] != other[name])
    says, other_says = (
        value.name if isinstance(value := of[field], (DType, ReduceOp)) else value
        for of in (one, other)
    )
    field = "total_bytes" if field == "nbytes" else field
    what = f"all-reduce {one['name']!r}"
    return MismatchError.between(what, field, (rank, says), (other_rank, other_says))


def group(
    tensors: Iterable[Tensor],
    threshold: int,
    rounded: Callable[[Tensor], bool],
    *,
    apart: bool = False,
) -> list[list[Tensor]]:
    """Say which tensors, in this order, travel together; alike wherever order and threshold are.

    A fusion buffer has at most `threshold` bytes; what is larger travels alone, and so do, if
    `apart`, those that are `rounded`, which does not depend on their neighbours. Groups are of one
    dtype and reduction each, rounded or not, in the order in which they are complete.
    """
    done: list[list[Tensor]] = []
    filling: dict[tuple[int, int, bool], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        _, dtype, op, nbytes, _, _ = tensor
        is_rounded = rounded(tensor)
        if nbytes >= threshold or (is_rounded and apart):
            done.append([tensor])
            continue
        key = dtype, op, is_rounded
        members, filled = filling.get(key, ([], 0))
        if filled + nbytes > threshold:
            done.append(members)
            members, filled = [], 0
        members.append(tensor)
        filling[key] = (members, filled + nbytes)
    return done + [members for members, _ in filling.values()]
