"""Errors that the ranks of a node tell each other."""

from __future__ import annotations

from typing import Any

from reducer import errors
from reducer.errors import ReductionError

_LONGEST_TEXT = 500  # characters; escaped by JSON they are six times as many at most
_LONGEST_VALUE = 100


def describe(error: ReductionError) -> dict[str, Any]:
    """Return an error as what a message can hold."""
    facts = {name: _plain(value) for name, value in vars(error).items()}
    return {"class": type(error).__name__, "text": str(error)[:_LONGEST_TEXT], **facts}


def revive(message: dict[str, Any]) -> ReductionError:
    """Return the error that `describe` was given."""
    cls = getattr(errors, message.pop("class"), ReductionError)
    if not (isinstance(cls, type) and issubclass(cls, ReductionError)):
        cls = ReductionError
    text = message.pop("text")
    facts = {
        name: tuple(value) if isinstance(value, list) else value for name, value in message.items()
    }
    return errors.rebuild(cls, (text,), facts)


def _plain(value: object) -> object:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(value, tuple):
        return value[:_LONGEST_VALUE]  # ranks
    return str(value)[:_LONGEST_VALUE]
