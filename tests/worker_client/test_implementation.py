"""Which twins serve, and what is said where they cannot."""

import logging
import sys

import pytest

from reducer.errors import ConfigError
from worker_client import protocol
from worker_client.runtime import implementation


def not_built(patch):
    patch.setitem(sys.modules, "worker_client.protocol._flight", None)
    patch.delattr(protocol, "_flight")


def test_the_compiled_one_serves_where_it_can():
    assert implementation.select(None).name == "compiled"
    for name in ("plain", "compiled"):
        assert implementation.select(name).name == name


def test_where_it_cannot_the_plain_one_serves_unless_it_is_demanded(monkeypatch, caplog):
    not_built(monkeypatch)
    with pytest.raises(ConfigError, match="C compiler"):
        implementation.select("compiled")
    assert caplog.records == []
    with caplog.at_level(logging.INFO):
        assert implementation.select(None).name == "plain"
    (record,) = caplog.records
    assert "C compiler" in record.getMessage()
    assert implementation.select("plain").name == "plain"
    assert len(caplog.records) == 1
