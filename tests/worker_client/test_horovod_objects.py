"""Objects as bytes and back: what is refused on either side."""

import struct

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

from reducer.errors import ConfigError
from worker_client.horovod.groups import short
from worker_client.horovod.objects import decode, encode


def framed(text, blob=b""):
    return struct.pack("<Q", len(text)) + text.encode() + blob


@pytest.mark.parametrize(
    "data",
    [
        b"",
        struct.pack("<Q", 1 << 62),
        framed("{"),
        framed('["list"]'),
        framed('["module", 0]'),
        framed('["bytes", 4]', b"abc"),
        framed('["bytes", -1]', b"abc"),
        framed('["bytes", 2]', b"abc"),
        framed('["tensor", "load", [1], 4]', b"abcd"),
        framed('["tensor", "float32", [-1, -1], 4]', b"abcd"),
        framed('["array", "O", [1], 8]', b"abcdefgh"),
        framed('["array", "<f4", [3], 4]', b"abcd"),
        framed('["dict", [[["list", []], 1]]]'),
        framed('["list", [' * 100_000),
    ],
)
def test_bytes_that_are_no_object_are_refused(data):
    with pytest.raises(ConfigError, match="no encoded object"):
        decode(data)


@pytest.mark.parametrize(
    "value", [object(), int, {"a": [lambda: 0]}, type("Text", (str,), {})("a"), slice(1), 1j]
)
def test_types_that_are_not_plain_are_refused(value):
    with pytest.raises(ConfigError, match="cannot be sent to other ranks"):
        encode(value)


def test_what_came_back_is_writable_and_alone():
    tensor = torch.arange(6.0).reshape(2, 3).t()
    back = decode(encode([tensor, tensor]))
    back[0].zero_()
    assert torch.equal(back[1], tensor)


def test_long_names_stay_different():
    names = {short(f"{'x' * 90}{'y' * at}") for at in range(20)}
    assert len(names) == 20
    assert max(len(name.encode()) for name in names) == 96
