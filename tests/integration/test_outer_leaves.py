"""Outer steps over leaves: NumPy's bits, and the same for any number of ranks."""

import numpy as np
import pytest
import torch

from reducer.errors import ConfigError
from reducer.wire.constants import ReduceOp
from tests.conftest import joined
from tests.integration.outer_leaves_rank import made, train
from tests.kernels.test_leaves import root
from tests.ranks import environments, run
from worker_client.outer.leaves import OuterLeaves

F = np.float32


def parameters(model):
    return [one.detach().numpy().copy() for one in model.parameters()]


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_workers_at_one_rank_have_the_bits_of_workers_apart(pool):
    lr, momentum, count = 0.5, 0.8, 5
    model, optimizer = made(dropout=0)
    with joined(1, servers=pool, job="outer") as (client,):
        outer = OuterLeaves(model, optimizer, count, lr=lr, momentum=momentum, client=client)
        for number in range(3):
            for worker in outer.round(number):
                train(model, optimizer, number, worker)
    apart = [made(dropout=0) for _ in range(count)]
    common = parameters(apart[0][0])
    velocity = [np.zeros_like(one) for one in common]
    for number in range(3):
        for worker, (own, its_optimizer) in enumerate(apart):
            for one, outer in zip(own.parameters(), common, strict=True):
                one.data.copy_(torch.from_numpy(outer))
            train(own, its_optimizer, number, worker)
        for at, outer in enumerate(common):
            mean = root([outer - parameters(own)[at] for own, _ in apart], ReduceOp.MEAN)
            velocity[at] = velocity[at] * F(momentum) + mean
            common[at] = outer - (mean + velocity[at] * F(momentum)) * F(lr)
    for one, other in zip(parameters(model), common, strict=True):
        assert one.tobytes() == other.tobytes()


def test_the_weights_are_the_same_for_any_number_of_ranks(pool, tmp_path):
    """Also where others go on from a checkpoint."""
    found = {}
    for ranks, rounds in ((1, (0, 4)), (3, (0, 2)), (2, (2, 4))):
        folder = tmp_path / ("whole" if ranks == 1 else "parts")
        folder.mkdir(exist_ok=True)
        command = ("-m", "tests.integration.outer_leaves_rank", *rounds, folder)
        found[rounds] = run(environments(ranks, pool), *command)
    assert set(found[0, 4]) == set(found[2, 4]), found
    assert set(found[0, 2]).isdisjoint(found[0, 4])


@pytest.mark.usefixtures("one_thread")
def test_what_would_lose_states_is_refused(pool):
    elastic = joined(1, servers=pool, job="elastic", on_rank_lost="continue")
    refused = pytest.raises(ConfigError, match="leave out REDUCTION_ON_RANK_LOST")
    with elastic as (client,), refused:
        OuterLeaves(*made(), 4, client=client)
    with joined(1, servers=pool, job="missing") as (client,):
        outer = OuterLeaves(*made(), 4, client=client)
        for _ in outer.round(0):
            pass
        state = outer.state_dict()
        del state["states"][2]
        again = OuterLeaves(*made(), 4, client=client)
        again.load_state_dicts([state])
        with pytest.raises(ConfigError, match="worker 2's is missing"):
            list(again.round(1))
