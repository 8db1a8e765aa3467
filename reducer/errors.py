"""Every error that a user of this system can meet, each with the facts as attributes.

Local misuse (`ConfigError`, `LocalProtocolError`) and remote misbehaviour (`RemoteProtocolError`)
are different classes. Each leaf that can cross the network has one code in
`reducer.wire.constants`.
"""

from __future__ import annotations

import copy
from inspect import Parameter, Signature, get_annotations
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class ReductionError(RuntimeError):
    """Root of this system's errors: what scripts for Horovod, and for torch's backends, catch.

    Attributes:
        sequence: number of the call concerned, within the job, or None.
        name: the name that the caller gave to that all-reduce, or None.
    """

    def __init__(self, message: str, *, sequence: int | None = None) -> None:
        super().__init__(message)
        self.sequence = sequence
        self.name: str | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are copied for each all-reduce they end and cross process boundaries in launchers;
        # the default would call the class without its keyword arguments.
        return rebuild, (type(self), self.args, self.__dict__)


def rebuild(
    cls: type[ReductionError], args: tuple[Any, ...], attributes: dict[str, Any]
) -> ReductionError:
    """Return an error with these `args` and attributes, without its class's arguments."""
    # Of the built-in class whose layout this one has, OSError's or RuntimeError's: `cls.__new__` is
    # the first that there is, and refuses the other.
    built_in: Any = cls
    while issubclass(built_in, ReductionError):
        built_in = built_in.__base__
    error: ReductionError = built_in.__new__(cls)
    error.args = args
    error.__dict__.update(attributes)
    return error


def renumbered(error: ReductionError, ranks: Sequence[int], where: str) -> ReductionError:
    """Return an error of a job that is a part of another one, in that one's numbers of ranks.

    Args:
        error: its `rank`, `other_rank` and `missing` count ranks of the part.
        ranks: of the whole job, by rank of the part.
        where: the part, for the message.
    """
    error = copy.copy(error)
    named: dict[int, int] = {}

    def number(rank: int) -> int:
        if 0 <= rank < len(ranks):
            named[rank] = ranks[rank]
        return named.get(rank, rank)

    for field in ("rank", "other_rank", "missing"):
        match getattr(error, field, None):
            case int(rank):
                setattr(error, field, number(rank))
            case tuple(missing):
                setattr(error, field, tuple(map(number, missing)))
    if named:
        who = ", ".join(f"rank {part} is rank {whole}" for part, whole in named.items())
        error.args = (f"{error} ({where}, where {who} of the job)",)
    return error


class _WithFacts(ReductionError):
    """What a class of these annotates are keywords of its constructor, and attributes."""

    __signature__: ClassVar[Signature]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if facts := get_annotations(cls):
            one, named = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
            parameters = [Parameter("message", one, annotation="str")]
            for name, kind in facts.items():
                default = vars(cls).get(name, Parameter.empty)
                parameters.append(Parameter(name, named, annotation=kind, default=default))
            cls.__signature__ = Signature(parameters, return_annotation="None")

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        given = self.__signature__.bind(message, **facts)
        given.apply_defaults()
        del given.arguments["message"]
        vars(self).update(given.arguments)


class ConfigError(ReductionError, ValueError):
    """A setting or an argument is wrong; the message says which, and what to write instead."""


class ProtocolError(ReductionError):
    """The protocol was broken."""


class LocalProtocolError(ProtocolError):
    """The API was used wrongly on this side, for instance in a forked child."""


class RemoteProtocolError(ProtocolError):
    """The other side sent something that the protocol does not allow."""


class VersionError(_WithFacts, ProtocolError):
    """The peer speaks another major version of the protocol."""

    expected: str  #: version that the refusing side speaks, such as ``"1.0"``
    got: str  #: version that the refused side announced


class MembershipError(ReductionError):
    """The process is not, or may not become, a member of the job."""


class LeavesMovedError(MembershipError):
    """Ranks were lost or joined since the leaves of this step were dealt: make the step again."""


class StaleGenerationError(_WithFacts, MembershipError):
    """The job has moved on to a later generation, or still has members of an earlier run."""

    generation: int  #: the generation that was refused
    current: int  #: the generation that the reducer holds
    sequence: int | None = None


class DuplicateRankError(_WithFacts, MembershipError):
    """Another live process already takes part under this rank."""

    rank: int  #: the contested rank


class MismatchError(_WithFacts):
    """Two ranks called the same all-reduce differently; nothing was reduced.

    `field` is what differs: ``total_bytes``, ``dtype``, ``op``, ``name``, a setting; ``history`` if
    ranks were asked for different calls before; ``call`` if `rank` has refused it, or is at another
    call of this name, because one failed before.
    """

    field: str  #: what differs
    rank: int  #: one of the two ranks that disagree
    other_rank: int  #: the other one
    expected: Any  #: the value given by `rank`
    got: Any  #: the value given by `other_rank`
    sequence: int | None = None

    @classmethod
    def between(
        cls,
        what: str,
        field: str,
        one: tuple[int, Any],
        other: tuple[int, Any],
        *,
        called: str = "",
        sequence: int | None = None,
    ) -> MismatchError:
        """Return the error of two ranks that disagree on a field.

        Args:
            what: they disagree on a field of this, such as ``all-reduce 7``.
            field: as the attribute of that name.
            one: a rank, and the value that it gave.
            other: another rank, and its value.
            called: the field in the message, if that is not its name.
            sequence: as the attribute of that name.
        """
        (rank, expected), (other_rank, got) = one, other
        return cls(
            f"{what}: ranks disagree on {called or field}: rank {rank} says {expected}, "
            f"rank {other_rank} says {got}",
            field=field,
            rank=rank,
            other_rank=other_rank,
            expected=expected,
            got=got,
            sequence=sequence,
        )


class RankLostError(_WithFacts):
    """A worker of the job died, left, or cannot be reached."""

    rank: int  #: the rank that is gone
    sequence: int | None = None


class ReducerLostError(_WithFacts, ConnectionError):
    """A reducer cannot be reached, died, or shut down."""

    reducer: str  #: its address, ``host:port``
    sequence: int | None = None


class ReductionTimeout(_WithFacts, TimeoutError):
    """An all-reduce did not finish before its deadline."""

    #: ranks whose contribution had not arrived, as far as a reducer could tell
    missing: tuple[int, ...] = ()
    sequence: int | None = None


class CapacityError(_WithFacts):
    """A limit of the reducer was reached; the message names it and how to raise it."""

    limit: str  #: name of the limit
    sequence: int | None = None


class AuthError(ReductionError):
    """The reducer does not accept this job's key."""


class DeviceError(_WithFacts):
    """A device such as a GPU failed while a tensor was copied from or to it.

    If it could not give its contribution, this client makes no further all-reduce: its calls would
    no longer be those of the other ranks, which get an error that names this rank.
    """

    device: str  #: its name, such as ``"cuda:0"``
    sequence: int | None = None
