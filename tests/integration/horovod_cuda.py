"""The Horovod interface with tensors on a GPU, which two ranks share; `horovod_rank` runs it."""

from functools import partial

import torch

import worker_client.horovod.torch as hvd
from tests.integration import horovod_calls, horovod_ops

LARGE = 1_000_003  # elements: an odd number


def result_of(tensor):
    assert tensor.device.type == "cuda"
    return horovod_ops.result_of(tensor)


def case_calls():
    on_gpu = partial(horovod_ops.tensor_of, device="cuda")
    calls = (hvd, on_gpu, [0, 1], hvd.rank())
    horovod_calls.check(horovod_calls.reductions(*calls), result_of)
    horovod_calls.check(horovod_calls.compressions(hvd, on_gpu), result_of)
    horovod_calls.check(horovod_calls.exchanges(*calls), result_of)


def case_large_and_sparse_ones():
    mine = torch.full((LARGE,), hvd.rank() + 1.0, device="cuda")
    assert (hvd.allreduce(mine, op=hvd.Sum) == 3).all()
    assert (hvd.broadcast(mine, 1) == 2).all()
    assert (hvd.allreduce_(mine) == 1.5).all()
    transposed = torch.full((2, 3), hvd.rank() + 1.0, device="cuda").t()
    hvd.broadcast_(transposed, 0)
    assert (transposed == 1).all()
    indices = torch.tensor([[0, 2 + hvd.rank()]], device="cuda")
    values = torch.full((2,), hvd.rank() + 1.0, device="cuda")
    sparse = torch.sparse_coo_tensor(indices, values, (4,), check_invariants=True)
    dense = hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense()
    assert result_of(dense).elements == [3.0, 0.0, 1.0, 2.0]
