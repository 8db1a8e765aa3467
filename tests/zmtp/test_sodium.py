"""Where libsodium is found."""

import ctypes.util
from pathlib import Path

import pytest

from reducer.errors import ConfigError
from reducer.zmtp import sodium


def test_it_is_the_one_that_libzmq_has_loaded():
    import zmq  # noqa: F401, PLC0415 (which loads it)

    assert len(sodium.addresses()) == len(sodium.FUNCTIONS)
    mapped = {
        line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line
    }
    assert len([path for path in mapped if "libsodium" in path]) == 1


def test_the_systems_serves_where_pyzmq_brings_none(monkeypatch):
    monkeypatch.setattr(sodium, "find_spec", lambda _: None)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so.23")
    assert sodium.library() == "libsodium.so.23"


def test_without_any_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr(sodium, "library", lambda: None)
    with pytest.raises(ConfigError, match="install pyzmq from a wheel"):
        sodium.addresses()


@pytest.mark.parametrize("name", ["libc.so.6", "libnone.so.1"])
def test_one_that_is_no_libsodium_is_named(monkeypatch, name):
    monkeypatch.setattr(sodium, "library", lambda: name)
    with pytest.raises(ConfigError, match=f"{name} cannot be used"):
        sodium.addresses()
