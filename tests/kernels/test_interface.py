"""Choosing a variant, and what every variant refuses."""

import sys

import numpy as np
import pytest

from reducer import kernels
from reducer.errors import ConfigError, LocalProtocolError
from reducer.wire.constants import DType, ReduceOp


@pytest.fixture(params=kernels.variants())
def variant(request):
    return kernels.select(request.param)


def test_the_best_variant_is_the_default():
    assert kernels.select().name == kernels.variants()[0]
    assert kernels.variants()[-1] == "numpy"


def test_an_unknown_variant_is_refused_with_the_usable_ones():
    with pytest.raises(ConfigError, match=r"'sse9' is not available here; use one of .*numpy"):
        kernels.select("sse9")


def test_the_twin_serves_without_the_extension(monkeypatch):
    monkeypatch.setitem(sys.modules, "reducer.kernels._kernels", None)
    monkeypatch.delattr(kernels, "_kernels", raising=False)
    assert kernels.variants() == ("numpy",)
    assert kernels.select().name == "numpy"


def test_any_bytes_like_object_serves(variant):
    zmq = pytest.importorskip("zmq")
    values = np.arange(6, dtype=np.float32)
    inputs = [
        values,
        values.tobytes(),
        bytearray(values.tobytes()),
        values.reshape(2, 3).data,
        zmq.Frame(values.tobytes()).buffer,
    ]
    out = np.empty(6, np.float32)
    variant.reduce(inputs, out, DType.FLOAT32, ReduceOp.SUM)
    assert (out == 5 * values).all()


def test_buffers_are_released(variant):
    source, out = bytearray(8), bytearray(8)
    variant.reduce([source], out, DType.FLOAT32, ReduceOp.SUM)
    with pytest.raises(LocalProtocolError):
        variant.reduce([source, b""], out, DType.FLOAT32, ReduceOp.SUM)
    source.append(0)  # a bytearray that is still exported cannot grow
    out.append(0)


CONFIG_ERRORS = [
    ("MEAN is not defined for INT32.*use SUM", DType.INT32, ReduceOp.MEAN),
    ("MAX is not defined for BLOCK8: only sums and", DType.BLOCK8, ReduceOp.MAX),
    *(
        ("unknown; use a DType and a ReduceOp", *its)
        for its in ((11, 1), (1, 0), (-1, 1), ("x", 1))
    ),
]
PROTOCOL_ERRORS = [
    ("at least one input", [], bytearray(8)),
    ("input 1 has 4 bytes where .* has 8", [bytes(8), bytes(4)], bytearray(8)),
    ("input 1 has 12 bytes where .* has 8", [bytes(8), bytes(12)], bytearray(8)),
    ("the output cannot be used as a buffer", [bytes(8)], bytes(8)),
    ("the output cannot be used as a buffer", [bytes(8)], None),
    ("input 1 cannot be used as a buffer", [bytes(8), "text"], bytearray(8)),
    ("input 1 cannot be used as a buffer", [bytes(8), np.zeros(16, np.uint8)[::2]], bytearray(8)),
]


@pytest.mark.parametrize(("match", "dtype", "op"), CONFIG_ERRORS)
def test_what_is_not_defined_is_refused(variant, match, dtype, op):
    with pytest.raises(ConfigError, match=match):
        variant.reduce([bytes(256)], bytearray(256), dtype, op)


@pytest.mark.parametrize(("match", "inputs", "out"), PROTOCOL_ERRORS)
def test_what_is_no_buffer_or_does_not_fit_is_refused(variant, match, inputs, out):
    with pytest.raises(LocalProtocolError, match=match):
        variant.reduce(inputs, out, DType.FLOAT32, ReduceOp.SUM)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BLOCK8])
def test_a_partial_element_is_refused(variant, dtype):
    with pytest.raises(LocalProtocolError, match=f"9 bytes are not a whole number of {dtype.name}"):
        variant.reduce([bytes(9)], bytearray(9), dtype, ReduceOp.SUM)


@pytest.mark.parametrize("shift", [1, 4, 7])
def test_an_output_over_a_part_of_an_input_is_refused(variant, shift):
    memory = memoryview(bytearray(32))
    below, above = memory[8:16], memory[8 + shift : 16 + shift]
    for source, out in ((below, above), (above, below)):
        with pytest.raises(LocalProtocolError, match="overlaps a part of input 1"):
            variant.reduce([bytes(8), source], out, DType.FLOAT32, ReduceOp.SUM)
    variant.reduce([below], memory[16:24], DType.FLOAT32, ReduceOp.SUM)  # neighbours are fine
