"""The state objects and the sampler of `hvd.elastic`, as one of three ranks that all stay."""

import pytest
import torch

import worker_client.horovod as hvd
from reducer.errors import ConfigError
from worker_client.horovod.job import CURRENT

SIZE = 3


def trained():
    """Return a model and an optimizer whose values and state are other ones at every rank."""
    torch.manual_seed(hvd.rank())
    net = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0 + hvd.rank(), momentum=0.9)
    net(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    return net, optimizer


def values(net, optimizer):
    momenta = [one["momentum_buffer"] for one in optimizer.state_dict()["state"].values()]
    tensors = [*net.state_dict().values(), *momenta]
    return [tensor.tolist() for tensor in tensors] + [optimizer.param_groups[0]["lr"]]


def case_sync_makes_everything_that_of_rank_0():
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1 + hvd.rank(), 5])
    seen = [hvd.rank()]
    state = hvd.elastic.TorchState(net, optimizer, scheduler=scheduler, epoch=hvd.rank(), seen=seen)
    expected = hvd.broadcast_object(values(net, optimizer))
    assert state.seen is seen
    state.sync()
    assert values(net, optimizer) == expected
    assert (state.epoch, state.seen) == (0, [0])
    assert scheduler.milestones == {1: 1, 5: 1}
    assert (state.model, state.optimizer) == (net, optimizer)
    # What was received is what a failure goes back to.
    state.epoch = 7
    net.bias.data += 1
    state.restore()
    assert values(net, optimizer) == expected
    assert state.epoch == 0


def case_a_failure_goes_back_to_the_last_commit():
    net, optimizer = trained()
    state = hvd.elastic.TorchState(net, optimizer, batch=0, seen=[])
    resets = []
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    found = []

    @hvd.elastic.run
    def train(state, factor, *, last):
        found.append((state.batch, list(state.seen), values(net, optimizer)))
        while state.batch < last:
            optimizer.zero_grad()
            net.weight.grad = torch.full_like(net.weight, 1.0 * factor)
            optimizer.step()
            state.batch += 1
            state.seen.append(state.batch)
            if state.batch == 2:
                state.commit()
                committed.append(values(net, optimizer))
            if state.batch == 3 and len(found) == 1:
                raise hvd.HorovodInternalError("on purpose")
        return state.batch

    committed = []
    assert train(state, 2, last=4) == 4
    assert found[1] == (2, [1, 2], committed[0])
    assert len(found) == 2
    assert resets == [SIZE]
    assert state.seen == [1, 2, 3, 4]


def case_an_interrupt_runs_the_function_again():
    state = hvd.elastic.ObjectState(batch=hvd.rank())
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.batch)
        state.batch = 10 * len(calls) + hvd.rank()
        if len(calls) < 3:
            raise hvd.HostsUpdatedInterrupt(skip_sync=len(calls) == 2)
        return "done"

    assert train(state) == "done"
    assert calls == [0, 10, 20 + hvd.rank()]


def case_a_failure_at_one_rank_takes_all_back():
    """Its calls without names are others than theirs by then."""
    state = hvd.elastic.ObjectState(step=0)
    calls = []

    @hvd.elastic.run
    def train(state):
        calls.append(state.step)
        for state.step in range(state.step, 4):  # noqa: B020 (as Horovod's users do)
            if state.step == 2 and len(calls) == 1:
                if hvd.rank() == 1:
                    hvd.allreduce(torch.ones(1), name="first", op=hvd.Sum)
                    raise hvd.HorovodInternalError("on purpose")
                hvd.allreduce(torch.ones(1), name="first", op=hvd.Sum)
                # What the others do is to see who is there, at the latest in their next commit.
                if CURRENT.job.renew():
                    raise hvd.HostsUpdatedInterrupt
            assert int(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == SIZE
            state.save()
        return len(calls)

    assert train(state) == 2
    assert calls[0] == 0


def case_what_is_wrong_with_the_script_is_raised():
    @hvd.elastic.run
    def train(state):
        del state
        hvd.broadcast(torch.zeros(1), root_rank=SIZE)

    with pytest.raises(ConfigError, match="root 3 is not a rank"):
        train(hvd.elastic.ObjectState(batch=0))


def case_a_dataset_is_divided_and_what_is_left_of_it_anew():
    sampler = hvd.elastic.ElasticSampler(range(100))
    mine = list(sampler)
    everybody = [at for one in hvd.allgather_object(mine) for at in one]
    assert len(sampler) == len(mine) == 34
    assert sorted(set(everybody)) == list(range(100))
    assert sorted(everybody) != everybody
    for batch in range(2):
        sampler.record_batch(batch, 10)
    other = hvd.elastic.ElasticSampler(range(100))
    other.load_state_dict(sampler.state_dict())
    done = {at for one in hvd.allgather_object(mine[:20]) for at in one}
    left = {at for one in hvd.allgather_object(list(other)) for at in one}
    assert done | left == set(range(100))
    assert len(done & left) == 0
    other.set_epoch(1)
    assert list(other) != mine
    for processed in (99, 100):
        other.load_state_dict({"epoch": 1, "processed_num": processed})
        assert len(list(other)) == 100 - processed
    plain = hvd.elastic.ElasticSampler(range(6), shuffle=False)
    assert list(plain) == [hvd.rank(), hvd.rank() + SIZE]
