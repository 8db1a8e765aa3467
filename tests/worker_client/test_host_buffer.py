"""Arrays and tensors as bytes: in place where possible, written back where not, or refused."""

import sys

import ml_dtypes
import numpy as np
import pytest
import torch

from reducer.errors import ConfigError
from reducer.wire.constants import DType
from worker_client.staging.host_buffer import find_dtype, host_buffer

# All but blocks, which travel alone.
DTYPES = {name.lower(): dtype for name, dtype in DType.__members__.items() if not dtype.is_block}


def double(data):
    """Do what an all-reduce does, doubling in place of summing; return whether it was in place."""
    buffer = host_buffer(data)
    assert buffer.view.ndim == 1
    assert buffer.view.itemsize == 1
    assert buffer.view.nbytes == data.nbytes
    np.frombuffer(buffer.view, buffer.dtype.name.lower())[:] *= 2
    if buffer.write_back is not None:
        buffer.write_back()
    return buffer.write_back is None


@pytest.mark.parametrize(("name", "code"), DTYPES.items())
def test_dtypes(name, code):
    array = np.arange(5).astype(getattr(ml_dtypes, name, name))
    tensor, given = torch.arange(5).to(getattr(torch, name)), array.tobytes()
    for data in (array, tensor):
        buffer = host_buffer(data)
        assert buffer.dtype is code
        assert bytes(buffer.view) == given
        buffer.view[:] = np.ones_like(array).tobytes()
    assert (array == 1).all()
    assert (tensor == 1).all()


def test_a_dtype_that_cannot_be_reduced_is_named():
    assert find_dtype("bfloat16") is DType.BFLOAT16
    with pytest.raises(ConfigError, match="dtype complex128 "):
        find_dtype("complex128")


SHAPES = {  # from six numbers
    "flat": lambda six: six,
    "2-d": lambda six: six.reshape(2, 3),
    "row": lambda six: six.reshape(2, 3)[1],
    "0-d": lambda six: six[2:3].reshape(()),
    "zero-size": lambda six: six[:0],
    "transposed vector": lambda six: six.reshape(1, 6).T,
}
STRIDED = {
    "every second": lambda six: six[::2],
    "column": lambda six: six.reshape(2, 3)[:, 1],
    "transposed": lambda six: six.reshape(2, 3).T,
}


of_either_kind = pytest.mark.parametrize("kind", [np, torch], ids=["array", "tensor"])


@of_either_kind
@pytest.mark.parametrize("layout", SHAPES | STRIDED)
def test_contiguous_memory_is_used_in_place_and_else_a_copy_is_written_back(kind, layout):
    shaped = (SHAPES | STRIDED)[layout]
    six = kind.arange(6, dtype=kind.float32)
    expected = shaped(kind.arange(6, dtype=kind.float32)) * 2
    data = shaped(six)
    assert double(data) is (layout in SHAPES)
    assert data.tolist() == expected.tolist()
    assert six.sum() == 15 + expected.sum() / 2  # nothing else was touched


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(6.0).reshape(2, 3)[::-1],
        np.arange(3.0).astype(ml_dtypes.bfloat16)[::-1],
    ],
    ids=["Fortran", "backwards", "backwards-bfloat16"],
)
def test_the_bytes_are_in_c_order(array):
    buffer = host_buffer(array)
    assert bytes(buffer.view) == array.tobytes(order="C")
    result = np.arange(100, 100 + array.size).astype(array.dtype).reshape(array.shape)
    buffer.view[:] = result.tobytes()
    assert buffer.write_back is not None
    buffer.write_back()
    assert (array == result).all()


def test_a_tensor_in_channels_last_order():
    tensor = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    before = tensor.clone()
    assert not double(tensor)
    assert torch.equal(tensor, before * 2)


@of_either_kind
@pytest.mark.parametrize("rows", [0, 1])
def test_at_most_one_element_has_no_stride_that_matters(kind, rows):
    data = kind.ones((5, 3), dtype=kind.float32)[:rows, 0]
    assert double(data)
    assert data.tolist() == [2.0] * rows


def test_a_tensor_can_be_resized_afterwards():
    tensor = torch.ones(3)
    host_buffer(tensor)
    assert tensor.resize_(1000).shape == (1000,)


def test_the_view_keeps_the_memory_alive():
    views = [host_buffer(np.full(1000, 7, np.uint8)).view]
    views.append(host_buffer(torch.full((1000,), 7, dtype=torch.uint8)).view)
    assert all(bytes(view) == b"\7" * 1000 for view in views)


NO_DTYPE = r"cannot be reduced: convert to one of float32, .*uint8"
READ_ONLY = r"read-only.*copy it"
SWAPPED = np.dtype(np.float32).newbyteorder()


@pytest.mark.parametrize(
    ("why", "refused"),
    [
        *((NO_DTYPE, np.ones(3, dtype)) for dtype in (bool, np.uint64, ml_dtypes.float8_e4m3fn)),
        (NO_DTYPE, np.array([None])),
        (NO_DTYPE, np.zeros(3, [("x", "f4")])),
        *((NO_DTYPE, torch.ones(3, dtype=dtype)) for dtype in (torch.bool, torch.float8_e4m3fn)),
        (READ_ONLY, np.frombuffer(bytes(24))),
        (READ_ONLY, np.broadcast_to(np.ones(1), (3,))),
        (READ_ONLY, np.broadcast_arrays(np.ones(1), np.ones(3))[0]),  # it only warns
        (r"byte order.*use array\.astype", np.ones(3, SWAPPED)),
        (r"on meta.*no elements: use to_empty\(\)", torch.ones(3, device="meta")),
        ("share memory", torch.ones(1).expand(3)),
        (r"sparse.*to_dense\(\), or sparse=False", torch.eye(3).to_sparse()),
        *(
            (f"takes a NumPy array or a torch tensor, got {type(one).__name__}: convert it", one)
            for one in ([1.0], None, np.float32(1), memoryview(b""))
        ),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
def test_what_cannot_be_reduced_in_place(why, refused):
    with pytest.raises(ConfigError, match=why):
        host_buffer(refused)


def test_a_negative_view_is_refused_where_copies_may_not_know_of_it(monkeypatch):
    monkeypatch.setattr("worker_client.staging.host_buffer._FLAT", ())
    view = torch.ones(4, dtype=torch.complex64).conj().imag
    with pytest.raises(ConfigError, match=r"use tensor\.resolve_neg\(\)"):
        host_buffer(view)
    assert double(view.resolve_neg()) is False


def test_a_list_is_refused_without_torch(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(ConfigError, match="got list"):
        host_buffer([1.0])


@pytest.mark.parametrize("strided", [False, True])
def test_a_leaf_that_requires_grad(strided):
    values = torch.arange(6.0).reshape(2, 3)
    leaf = torch.nn.Parameter(values.t() if strided else values)
    before = leaf.detach().clone()
    assert double(leaf) is not strided
    assert torch.equal(leaf, before * 2)
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf.grad_fn is None


def test_the_lazily_negated_half_of_a_complex_tensor():
    tensor = torch.tensor([1 + 2j, 3 + 4j]).conj().imag
    assert tensor.is_neg()
    buffer = host_buffer(tensor)
    assert np.frombuffer(buffer.view, np.float32).tolist() == [-2.0, -4.0]
    assert buffer.write_back is not None


def test_a_tensor_that_only_wraps_others():
    wrapped = torch.func.vmap(host_buffer)
    with pytest.raises(ConfigError, match="gives no access to its elements"):
        wrapped(torch.ones(3, 2))
