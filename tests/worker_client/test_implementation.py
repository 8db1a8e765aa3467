"""Which twins serve, and what is said where they cannot."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import pytest

from reducer import libzmq
from reducer.errors import ConfigError
from worker_client import protocol
from worker_client.runtime import implementation

if TYPE_CHECKING:
    from collections.abc import Callable


def not_built(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "worker_client.protocol._flight", None)
    patch.delattr(protocol, "_flight")


def no_libzmq(patch: pytest.MonkeyPatch) -> None:
    def addresses() -> tuple[int, ...]:
        raise ConfigError("the libzmq that pyzmq uses cannot be called directly: no such module")

    patch.setattr(libzmq, "addresses", addresses)


def test_the_compiled_one_serves_where_it_can() -> None:
    assert implementation.select(None).name == "compiled"
    for name in ("plain", "compiled"):
        assert implementation.select(name).name == name


@pytest.mark.parametrize(
    ("obstacle", "reason"), [(not_built, "C compiler"), (no_libzmq, "cannot be called directly")]
)
def test_where_it_cannot_the_plain_one_serves_unless_it_is_demanded(
    obstacle: Callable[[pytest.MonkeyPatch], None],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    obstacle(monkeypatch)
    with pytest.raises(ConfigError, match=reason):
        implementation.select("compiled")
    assert caplog.records == []
    with caplog.at_level(logging.INFO):
        assert implementation.select(None) is implementation.PLAIN
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert implementation.select("plain") is implementation.PLAIN
    assert len(caplog.records) == 1
