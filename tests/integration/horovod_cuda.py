"""The Horovod interface with tensors on a GPU, which two ranks share; `horovod_rank` runs it."""

import torch

import worker_client.horovod.torch as hvd

LARGE = 1_000_003  # elements: an odd number


def mine(*shape):
    return torch.full(shape, float(hvd.rank() + 1), device="cuda")


def check(result, expected):
    assert result.device.type == "cuda"
    assert result.tolist() == expected


def case_reductions():
    assert (hvd.allreduce(mine(LARGE), op=hvd.Sum) == 3).all()
    assert (hvd.allreduce_(mine(LARGE)) == 1.5).all()
    for reduced in hvd.grouped_allreduce([mine(5), mine(5)], op=hvd.Sum):
        check(reduced, [3.0] * 5)
    check(hvd.allreduce(mine(5), compression=hvd.Compression.fp16), [1.5] * 5)
    check(hvd.reducescatter(mine(4), op=hvd.Sum), [3.0] * 2)


def case_broadcasts():
    assert (hvd.broadcast(mine(LARGE), 1) == 2).all()
    transposed = mine(2, 3).t()
    hvd.broadcast_(transposed, 0)
    assert (transposed == 1).all()
    whole = torch.tensor(hvd.rank(), device="cuda")
    assert hvd.broadcast(whole, 1) == 1


def case_gathers():
    check(hvd.allgather(mine(hvd.rank() + 1)), [1.0, 2.0, 2.0])
    check(hvd.allgather(mine(0)), [])
    received, counts = hvd.alltoall(mine(3), splits=torch.tensor([1, 2], device="cuda"))
    check(received, [1.0, 2.0] if hvd.rank() == 0 else [1.0, 1.0, 2.0, 2.0])
    check(counts, [1, 1] if hvd.rank() == 0 else [2, 2])
    indices = torch.tensor([[0, 2 + hvd.rank()]], device="cuda")
    sparse = torch.sparse_coo_tensor(indices, mine(2), (4,), check_invariants=True)
    check(hvd.sparse_allreduce_async(sparse, "sparse", hvd.Sum)().to_dense(), [3.0, 0.0, 1.0, 2.0])


def case_training():
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), hvd.SyncBatchNorm(20)).to("cuda")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        named_parameters=model.named_parameters(),
    )
    for step in range(3):
        torch.manual_seed(10 * step + hvd.rank())
        optimizer.zero_grad()
        model(torch.randn(8, 30, device="cuda")).square().mean().backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    first, second = hvd.allgather_object([one.tolist() for one in model.parameters()])
    assert first == second
