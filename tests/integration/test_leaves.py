"""Sums of leaves: the same bits for any number of ranks and reducers, and whoever dies."""

import json
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest

from reducer.errors import ConfigError, MismatchError
from reducer.wire.constants import ReduceOp
from tests.conftest import joined, local_pool
from tests.integration.calls import process_of, reduced
from tests.kernels.test_leaves import node, root
from tests.pages import blocks
from tests.ranks import environments
from tests.ranks import ranks as run
from worker_client.client.bootstrap import DEFAULT

SIZES = (0, 1, 1000, 70_001, 600_000)  # elements


def leaves_of(count, size, dtype=np.float32):
    rng = np.random.default_rng([count, size])
    return [(rng.standard_normal(size) * 10.0 ** (leaf % 7)).astype(dtype) for leaf in range(count)]


def subtree_sums(leaves, share):
    """What a rank passes: for each of its subtrees the node above its leaves."""
    parts = [leaves[part.start : part.stop] for part in share.parts]
    sums = [node(own, np.add, 0, 1 << (len(own) - 1).bit_length()) for own in parts]
    return np.stack(sums)


def sums(clients, leaves, op="sum"):
    """All ranks' results of the sum of these leaves."""
    given, works = [], []
    for client in clients:
        share = client.leaves(len(leaves))
        given.append(subtree_sums(leaves, share))
        works.append(client.reduce_leaves(given[-1], share, op))
    for work in works:
        work.wait(30)
    return [array[0] for array in given]


@pytest.mark.extended_cases("1-2", "1-3", "1-4", "1-7", "1-8", "3-1", "3-2", "3-4", "3-5", "3-7")
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("reducers", [1, 3])
def test_the_bits_are_those_of_the_tree(ranks, reducers):
    job = f"leaves-{ranks}"
    with local_pool(reducers) as servers, joined(ranks, servers=servers, job=job) as clients:
        for count, size in product((8, 24), SIZES):
            leaves = leaves_of(count, size)
            for op, kind in (("sum", ReduceOp.SUM), ("mean", ReduceOp.MEAN)):
                total = root(leaves, kind).tobytes()
                for rank, result in enumerate(sums(clients, leaves, op)):
                    assert result.tobytes() == total, f"{rank=} {count=} {size=} {op=}"


def test_other_calls_and_other_leaves_in_between():
    """Chunks are cut by the number of subtrees, and other calls of the size as ever."""
    leaves = leaves_of(9, 300_000)
    with local_pool(2) as servers, joined(4, servers=servers, job="between") as clients:
        for _ in range(3):
            ones = [np.ones(300_000, np.float32) for _ in clients]
            assert all((one == 4).all() for one in reduced(clients, ones, "sum"))
            for count in (4, 9):
                total = root(leaves[:count], ReduceOp.SUM).tobytes()
                assert {each.tobytes() for each in sums(clients, leaves[:count])} == {total}


def test_a_reducer_dies_in_between():
    leaves = leaves_of(24, 400_000)
    total = root(leaves, ReduceOp.SUM).tobytes()
    with local_pool(3) as servers, joined(5, servers=servers, job="dies") as clients:
        assert {each.tobytes() for each in sums(clients, leaves)} == {total}
        works, given = [], []
        for client in clients:
            share = client.leaves(24)
            for _ in range(8):
                given.append(subtree_sums(leaves, share))
                works.append(client.reduce_leaves(given[-1], share))
        process_of(servers[1]).kill()
        for work in works:
            work.wait(30)
        assert {array[0].tobytes() for array in given} == {total}


def test_ranks_that_disagree_on_the_leaves_are_told():
    with local_pool(1) as servers, joined(2, servers=servers, job="disagree") as clients:
        works = []
        for client, count in zip(clients, (4, 8), strict=True):
            share = client.leaves(count)
            array = np.ones((len(share.parts), 10), np.float32)
            works.append(client.reduce_leaves(array, share))
        for work in works:
            with pytest.raises(MismatchError, match="leaves"):
                work.wait(10)


def test_what_cannot_be_is_refused():
    with local_pool(1) as servers, joined(2, servers=servers, job="refused") as clients:
        client = clients[0]
        for count in (0, 1, (1 << 16) + 1):
            with pytest.raises(ConfigError, match="leaves"):
                client.leaves(count)
        share = client.leaves(3)
        with pytest.raises(ConfigError, match="one array for each"):
            client.reduce_leaves(np.ones((len(share.parts) + 1, 4), np.float32), share)
        with pytest.raises(ConfigError, match=r"Client\.leaves"):
            client.reduce_leaves(np.ones((3, 4), np.float32), 3)


def fingerprints(ranks, reducers, count, **settings):
    """Of the weights of a training with leaves, at every rank."""
    with local_pool(reducers) if reducers else nullcontext(()) as servers:
        how = environments(ranks, servers, **settings)
        with run(how, "-m", "torture.leaves_rank", "12", str(count)) as job:
            ends = [json.loads(output.splitlines()[-1]) for output in job.outputs()]
            return [end["fingerprint"] for end in ends]


# Reducers of a pool, 0: embedded ones.
FEW = ((1, 1), (5, 2))
ALL = tuple(product((1, 2, 3, 4, 5, 7, 8), (1, 3, 8, 0)))


@pytest.mark.extended_cases("none", "every")
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("wire", "count", "jobs"),
    [
        pytest.param("bf16", 24, FEW, id="bf16"),
        pytest.param("none", 24, FEW, id="none"),
        *(
            pytest.param(wire, count, ALL, id=f"every-{wire}-{count}")
            for wire, count in product(("none", "bf16"), (8, 24))
        ),
    ],
)
def test_a_training_ends_with_the_same_weights_for_any_number_of_ranks(wire, count, jobs):
    found = {}
    for ranks, reducers in jobs:
        made = fingerprints(ranks, reducers, count, REDUCTION_WIRE_DTYPE=wire)
        assert len(set(made)) == 1
        found[ranks, reducers] = made[0]
    assert len(set(found.values())) == 1, found


@pytest.mark.extended("test_a_training_ends_with_the_same_weights_for_any_number_of_ranks")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("count", [8, 24])
@pytest.mark.parametrize("wire", ["none", "bf16"])
def test_the_small_gpt_ends_with_the_same_weights(wire, count):
    said = set()
    example = ["examples/leaves_gpt.py", "--steps", "300", "--leaves", str(count)]
    for ranks, reducers in ((1, 1), (2, 8), (3, 3), (4, 0), (5, 1), (7, 3), (8, 8), (8, 0)):
        with local_pool(reducers) if reducers else nullcontext(()) as servers:
            how = environments(ranks, servers, REDUCTION_WIRE_DTYPE=wire)
            with run(how, *example) as job:
                said.update(output.partition(": ")[2] for output in job.outputs(800))
    assert len(said) == 1, said


@pytest.mark.parametrize(("section", "on_rank_lost"), [("A loop", "continue"), ("DiLoCo", "error")])
def test_a_loop_of_the_page_runs_as_shown(section, on_rank_lost):
    torch = pytest.importorskip("torch", reason="needs torch")
    (text,) = blocks("docs/leaves.md", "python", section)
    model = torch.nn.Linear(5, 3)
    data = Samples(torch.randn(800, 5), torch.randint(0, 3, (800,)))
    loss, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1)
    names = {"data": data, "steps": 2, "rounds": 2, "every": 2}
    names |= {"model": model, "loss": loss, "optimizer": optimizer}
    before = [parameter.clone() for parameter in model.parameters()]
    threads = torch.get_num_threads()
    with local_pool(1) as servers, pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDUCTION_SERVERS", servers[0])
        for name, value in (("JOB", "the page's"), ("ON_RANK_LOST", on_rank_lost)):
            patch.setenv(f"REDUCTION_{name}", value)
        patch.setenv("RANK", "0")
        patch.setenv("WORLD_SIZE", "1")
        try:
            exec(text, names)  # noqa: S102 (the page's own)
        finally:
            torch.set_num_threads(threads)
            if DEFAULT.exists:
                DEFAULT.get().shutdown()
    changed = zip(model.parameters(), before, strict=True)
    assert not any(torch.equal(one, other) for one, other in changed)


class Samples:
    """A data set that gives several samples at once."""

    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, samples):
        return [column[samples] for column in self.columns]
