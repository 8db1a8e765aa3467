"""Optimizers and join() of the Horovod interface, as one of three ranks, beside their like by hand.

What an optimizer comes to is compared to the same training whose gradients Gloo adds up.
"""

import hashlib
import warnings

import pytest
import torch
import torch.distributed as dist

import worker_client.horovod as hvd
from reducer.errors import ConfigError, LocalProtocolError

SIZE = 3
STEPS = 6


class Net(torch.nn.Module):
    """Two layers, one that is frozen, one that is never used, and one that rank 0 alone uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 16)
        self.frozen = torch.nn.Linear(16, 16).requires_grad_(False)
        self.last = torch.nn.Linear(16, 1)
        self.unused = torch.nn.Linear(2, 2)
        self.at_rank_0 = torch.nn.Linear(16, 1)

    def forward(self, x):
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(hidden) + (self.at_rank_0(hidden) if hvd.rank() == 0 else 0)


def batch(step):
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(100 * hvd.rank() + step))


def loss_of(net, step):
    x = batch(step)
    return (net(x) - x.sum(1, keepdim=True)).square().mean()


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def add_up(net, *, average=True, active=True):
    """Do by hand, over Gloo, what the optimizer shall do."""
    for parameter in net.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        total = parameter.grad.clone() if active else torch.zeros_like(parameter)
        dist.all_reduce(total)
        if active:
            parameter.grad.copy_(total / SIZE if average else total)


def train_by_hand(*, average=True, passes=1, clip=False):
    net = Net()
    optimizer = sgd(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        for at in range(passes):
            loss_of(net, step + at).backward()
        add_up(net, average=average)
        if clip:
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
    return net


def train(net, optimizer, *, passes=1):
    for step in range(STEPS):
        optimizer.zero_grad()
        for at in range(passes):
            loss_of(net, step + at).backward()
        optimizer.step()
    return net


def weights(net):
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def assert_alike(net, other, rtol=1e-5):
    torch.testing.assert_close(weights(net), weights(other), rtol=rtol, atol=1e-6)
    digest = hashlib.sha256(weights(net).numpy().tobytes()).hexdigest()
    assert len(set(hvd.allgather_object(digest))) == 1


def wrapped(net, **options):
    options.setdefault("named_parameters", net.named_parameters())
    return hvd.DistributedOptimizer(sgd(net), **options)


def case_averages_and_sums():
    once, twice = train_by_hand(), train_by_hand(passes=2)
    for options, passes, reference in (
        ({}, 1, once),
        ({"named_parameters": None}, 1, once),
        ({"groups": 2}, 1, once),
        ({"num_groups": 1}, 1, once),
        ({"gradient_predivide_factor": 4.0}, 1, once),
        ({"sparse_as_dense": True}, 1, once),
        ({"backward_passes_per_step": 2}, 2, twice),
        # step() before all passes were made reduces what there is.
        ({"backward_passes_per_step": 3}, 2, twice),
    ):
        net = Net()
        assert_alike(train(net, wrapped(net, **options), passes=passes), reference)
    net = Net()
    listed = [[net.first.weight, net.last.weight], [net.unused.bias, net.frozen.bias]]
    assert_alike(train(net, wrapped(net, groups=listed)), once)
    net = Net()
    optimizer = wrapped(net)
    optimizer.set_backward_passes_per_step(2)
    assert_alike(train(net, optimizer, passes=2), twice)
    net = Net()
    assert_alike(train(net, wrapped(net, op=hvd.Sum)), train_by_hand(average=False), 1e-4)
    wrapped(Net())  # and dropped: an optimizer that is gone reduces nothing
    net = Net()
    assert_alike(train(net, wrapped(net)), once)


def case_compressed():
    reference = train_by_hand()
    for compressor, tolerance in ((hvd.Compression.fp16, 5e-3), (hvd.Compression.bf16, 5e-2)):
        for groups in (None, 2):
            net = Net()
            train(net, wrapped(net, compression=compressor, groups=groups))
            assert net.first.weight.grad.dtype == torch.float32
            assert not torch.equal(weights(net), weights(reference))
            far = (weights(net) - weights(reference)).abs().max()
            assert far < tolerance, far
            assert_alike(net, net)


def case_clipping():
    net = Net()
    optimizer = wrapped(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert_alike(net, train_by_hand(clip=True))


def case_schedulers_and_closures():
    net, other = Net(), Net()
    plain = sgd(other)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1)  # made for the optimizer that is given
    optimizer, again = hvd.DistributedOptimizer(plain, other.named_parameters()), wrapped(net)
    assert isinstance(optimizer, torch.optim.SGD)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(other, 0)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0
    again.zero_grad()
    loss_of(net, 0).backward()
    again.step()
    assert_alike(net, other)
    with warnings.catch_warnings():  # it does not see the other one's steps
        warnings.simplefilter("ignore")
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.005)


def case_sparse_gradients():
    rows = torch.tensor([[0, 1], [1, 2], [3, 1]])[hvd.rank()]
    for as_dense in (False, True):
        for op in (hvd.Average, hvd.Sum):
            table = torch.nn.Embedding(5, 2, sparse=True)
            torch.nn.init.ones_(table.weight)
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(table.parameters(), lr=1.0), op=op, sparse_as_dense=as_dense
            )
            table(rows).sum().backward()
            optimizer.step()
            assert table.weight.grad.is_sparse
            share = 1 if op is hvd.Sum else 1 / SIZE
            expected = torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0]) * share
            torch.testing.assert_close(1 - table.weight[:, 0], expected)


def case_an_optimizer_of_some_ranks():
    rank = hvd.rank()
    some = hvd.add_process_set([0, 2])
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], process_set=some
    )
    for _ in range(2):
        optimizer.zero_grad()
        (weight * (10 if rank == 1 else rank)).sum().backward()
        optimizer.step()
    assert weight.tolist() == [-20.0 if rank == 1 else -2.0] * 2  # rank 1 is by itself
    hvd.remove_process_set(some)
    with pytest.raises(ConfigError, match="not in use"):
        hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), process_set=some)
    one = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([one, torch.nn.Parameter(torch.zeros(1), requires_grad=False)], lr=1.0)
    hvd.broadcast_optimizer_state(plain, root_rank=1)
    assert one.grad.tolist() == [0.0, 0.0]  # as after Horovod's step with zeros
    assert plain.param_groups[0]["params"][1].grad is None


def case_batches_of_all_ranks_are_normalized_together():
    rank, sizes = hvd.rank(), [2, 5, 3]
    torch.manual_seed(4)
    for rest, momentum, dtype in (
        ((), 0.1, torch.float64),
        ((3, 2), None, torch.float32),
        ((4,), 0.3, torch.float32),
    ):
        batches = [torch.randn(size, 4, *rest, dtype=dtype) * 3 + 5 for size in sizes]
        factors = [torch.randn_like(batch) for batch in batches]
        ours = hvd.SyncBatchNorm(4, momentum=momentum).to(dtype)
        kind = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d}
        whole = kind[batches[0].dim()](4, momentum=momentum).to(dtype)
        for _ in range(2):
            mine = batches[rank].clone().requires_grad_()
            everything = torch.cat(batches).requires_grad_()
            out, expected = ours(mine), whole(everything)
            torch.testing.assert_close(out, expected.split(sizes)[rank])
            (out * factors[rank]).sum().backward()
            (expected * torch.cat(factors)).sum().backward()
            torch.testing.assert_close(mine.grad, everything.grad.split(sizes)[rank])
        for name in ("weight", "bias"):
            total = hvd.allreduce(getattr(ours, name).grad, op=hvd.Sum)
            torch.testing.assert_close(total, getattr(whole, name).grad)
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name], value)
        ours.eval()
        whole.eval()
        torch.testing.assert_close(ours(batches[rank]), whole(batches[rank]))
    with pytest.raises(ConfigError, match="got 1 dimensions"):
        ours.train()(torch.ones(4))
    with pytest.raises(ConfigError, match="fewer than 2 values"):
        ours(torch.ones(int(rank == 1), 4))


def case_new_parameters():
    net, late = Net(), torch.nn.Parameter(torch.zeros(3))
    optimizer = wrapped(net)
    optimizer.add_param_group({"params": [late]})
    (loss_of(net, 0) + (late * hvd.rank()).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(late.detach(), torch.full((3,), -0.05))


def case_optimizer_state():
    for make in (
        lambda net: torch.optim.Adam(net.parameters(), lr=0.1 / (hvd.rank() + 1), amsgrad=True),
        sgd,
    ):
        net = Net()
        optimizer = make(net)
        if hvd.rank() == 1:  # as if it had loaded a checkpoint
            for step in range(2):
                optimizer.zero_grad()
                loss_of(net, step).backward()
                optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        hvd.broadcast_parameters(net.state_dict(), root_rank=1)
        states = hvd.allgather_object(optimizer.state_dict())
        assert states[0]["state"]
        assert str(states[0]) == str(states[1]) == str(states[2])
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
        assert_alike(train(net, optimizer), net)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    with pytest.raises(ConfigError, match="LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(Net().parameters()), 0)


def case_misuse():
    net = Net()
    optimizer = wrapped(net)
    loss_of(net, 0).backward()
    with pytest.raises(LocalProtocolError, match="between backward"):
        optimizer.zero_grad()
    with pytest.raises(LocalProtocolError, match="more often than backward_passes_per_step"):
        loss_of(net, 0).backward()
    optimizer.synchronize()
    # The words that Horovod's users look for.
    with pytest.warns(UserWarning, match=r"called without optimizer\.skip_synchronize\(\)"):
        optimizer.step()
    assert_alike(train(net, optimizer), net)
    a, b = net.first.weight, net.first.bias
    for options, message in (
        ({"named_parameters": [a, b]}, "tuples of a name"),
        ({"named_parameters": [("a", a), ("a", b)]}, "must differ: a"),
        ({"named_parameters": [("a", a)]}, "lacks 9 of"),
        ({"backward_passes_per_step": 0}, "1 or more, got 0"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op=hvd.Average alone"),
        ({"op": hvd.Adasum}, "Adasum"),
        ({"groups": 0}, "1 or more"),
        ({"groups": [["a"]]}, "lists of tensors"),
        ({"groups": [[a], [a]]}, "one of the groups alone"),
    ):
        with pytest.raises(ConfigError, match=message):
            wrapped(net, **options)
    with pytest.raises(ConfigError, match="wrap it once"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ConfigError, match="LBFGS"):
        hvd.DistributedOptimizer(torch.optim.LBFGS(net.parameters()))


def train_unevenly_by_hand(steps):
    net = Net()
    optimizer = sgd(net)
    for step in range(2 * SIZE):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        add_up(net, active=step < steps)
        if step < steps:
            optimizer.step()
    return net


def case_ranks_begin_a_step_at_different_moments():
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    if hvd.rank() > 0:
        (parameter * 3).sum().backward()
    assert hvd.allreduce(torch.tensor([1]), op=hvd.Sum).item() == SIZE  # unnamed
    optimizer.step()
    assert parameter.tolist() == [-2.0, -2.0]


def case_uneven_batches():
    rank = hvd.rank()
    for options in ({}, {"groups": 2, "compression": hvd.Compression.none}):
        reference = train_unevenly_by_hand(2 + 2 * rank)
        net, bias = Net(), torch.nn.Parameter(torch.ones(1))
        optimizer = wrapped(net, **options)
        second = hvd.DistributedOptimizer(torch.optim.SGD([bias]))
        for step in range(2 + 2 * rank):
            optimizer.zero_grad()
            loss_of(net, step).backward()
            active = [at for at in range(SIZE) if step < 2 + 2 * at]
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == len(active)
            assert hvd.allreduce(torch.tensor([rank]), op=hvd.Min, name="lowest") == min(active)
            optimizer.step()
            second.zero_grad()
            (bias * rank).sum().backward()
            second.step()
        assert hvd.join() == SIZE - 1
        torch.testing.assert_close(weights(net), weights(reference), rtol=1e-5, atol=1e-6)
        hvd.broadcast_parameters(net.state_dict(), SIZE - 1)
        assert_alike(net, net)
    assert hvd.join() == SIZE - 1
    assert hvd.allreduce(torch.tensor([rank]), op=hvd.Sum).item() == 3
    assert hvd.join(hvd.local_rank()) == SIZE - 1  # as scripts for GPUs write


def case_after_shutdown_calls_are_refused():
    hvd.shutdown()
    hvd.shutdown()  # a second time does nothing
    with pytest.raises(ConfigError, match=r"call hvd\.init\(\) first"):
        hvd.rank()
