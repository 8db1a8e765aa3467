"""Which key may join which job (sans I/O); the rule is that of `docs/protocol.md`, section 10."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reducer.errors import AuthError, ConfigError
from reducer.keyfiles import is_key
from reducer.wire.job_names import is_owner, owner

if TYPE_CHECKING:
    from collections.abc import Mapping

LOCAL = "inproc"  # what a peer in this process shows instead of a key; no key is as short
ANY = "*"


class AllowList:
    """The public keys that a pool admits, and the jobs that each is bound to.

    Args:
        names: by public key, the names that its jobs may begin with; `ANY` stands for all.
    """

    def __init__(self, names: Mapping[str, frozenset[str]]) -> None:
        self._names = dict(names)

    def __eq__(self, other: object) -> bool:
        """Whether both admit the same."""
        return isinstance(other, AllowList) and self._names == other._names

    __hash__ = None  # type: ignore[assignment]  # nobody keeps one in a set

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._names)

    def knows(self, key: str) -> bool:
        """Whether a key may connect at all."""
        return key in self._names

    def refusal(self, key: str, job: str) -> AuthError | None:
        """Say why who came with a key, or `LOCAL`, may not take part in a job, if so."""
        if key == LOCAL:
            return None
        names = self._names.get(key)
        if names is None:
            return AuthError(
                "this worker's key is not on the pool's allow-list, or not any more: give it a key "
                "that is (REDUCTION_KEYS), or have its line put back"
            )
        if not names & {ANY, owner(job)}:
            mine = " or ".join(sorted(names))
            return AuthError(
                f"this worker's key is for job {mine}, not for {job!r}: set "
                f"REDUCTION_JOB to {mine}, or to a name that begins with it and a slash"
            )
        return None


def parse(text: str) -> AllowList:
    """Read an allow-list: lines of ``NAME[,NAME...] PUBLICKEY``, or comments that begin with #.

    Raises:
        ConfigError: a line is wrong; the message has its number, and no key.
    """
    found: dict[str, frozenset[str]] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        names, _, key = line.strip().partition(" ")
        key = key.strip()
        owners = frozenset(names.split(","))
        if not is_key(key) or not all(name == ANY or is_owner(name) for name in owners):
            raise ConfigError(
                f"line {number} of the allow-list is wrong: write JOB, a space and a public key of "
                "40 characters; a job's name has letters, digits, - and _, at most 48"
            )
        found[key] = found.get(key, frozenset()) | owners
    return AllowList(found)
