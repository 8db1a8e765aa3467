"""Cases, what becomes of each, and how a command tells: a line a case."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from reducer.conformance.peer import FailedCaseError
from reducer.errors import ReductionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Case(NamedTuple):
    """One thing that the specification demands.

    Attributes:
        section: of the specification, `docs/protocol.md`.
        what: the demand, as a sentence.
        run: tries it; raises `FailedCaseError` if it is not met.
    """

    section: int
    what: str
    run: Callable[..., None]


class Result(NamedTuple):
    """What became of a case: `problem` is empty if the demand is met."""

    case: Case
    problem: str


def attempt(case: Case, *arguments: Any) -> Result:
    """Try a case. What is malformed, or ends too early, is the other side's failure."""
    try:
        case.run(*arguments)
        problem = ""
    except (FailedCaseError, ReductionError, OSError) as error:
        problem = str(error) or type(error).__name__
    return Result(case, problem)


def tell(results: Iterable[Result], say: Callable[[str], object]) -> bool:
    """Say a line for each case as it ends, and one that counts them; return whether all passed."""
    counts = [0, 0]
    for case, problem in results:
        counts[bool(problem)] += 1
        tail = f": {problem}" if problem else ""
        verdict = "FAIL" if problem else "ok  "
        say(f"{verdict} [{case.section}] {case.what}{tail}")
    say(f"{counts[0]} of {sum(counts)} cases passed")
    return not counts[1]


def demand(holds: object, problem: str) -> None:
    """Fail a case unless something holds."""
    if not holds:
        raise FailedCaseError(problem)
