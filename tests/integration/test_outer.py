"""Outer steps: the ranks' bits beside NumPy's, checkpoints, lost reducers, ranks that differ."""

import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from reducer.errors import ConfigError, MismatchError, ReductionError, ReductionTimeout
from tests.conftest import joined
from tests.integration.calls import each
from worker_client import elastic
from worker_client.client.bootstrap import connect
from worker_client.client.client import Client
from worker_client.outer import OuterOptimizer

F = np.float32
STREAMING = {"every": 4, "fragments": 2, "delay": 3, "lr": 0.7, "momentum": 0.9}
INT8 = {"wire_dtype": "int8"}
WIDE = 80  # 80 * 80 float32 values are rounded on the wire, 80 are not


def layers(width=6, seed=7):
    """Two layers whose weights are the same every time."""
    made = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    generator = torch.Generator().manual_seed(seed)  # ranks are threads
    for parameter in made.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return made


@dataclass
class Rank:
    """A rank's training: its own data, plain SGD, and outer steps."""

    client: Client
    settings: dict[str, Any]
    width: int = 6
    seed: int = 7
    step: int = 0
    weights: list[bytes] = field(default_factory=list)  # after each step

    def __post_init__(self):
        self.model = layers(self.width, self.seed)
        self.sgd = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.outer = OuterOptimizer(self.model, self.client, **self.settings)

    def train(self, until, tokens=1.0):
        while self.step < until:
            own_step(self.model, self.sgd, self.client.rank, self.step, self.width)
            self.outer.step(tokens=tokens)
            self.step += 1
            self.weights.append(weights(self.model))
        return self

    def saved(self):
        file = io.BytesIO()
        state = [one.state_dict() for one in (self.model, self.sgd, self.outer)]
        torch.save([*state, self.step], file)
        return file.getvalue()

    def load(self, saved):
        model, sgd, outer, self.step = torch.load(io.BytesIO(saved), weights_only=True)
        self.model.load_state_dict(model)
        self.sgd.load_state_dict(sgd)
        self.outer.load_state_dict(outer)
        return self


def own_step(model, sgd, rank, step, width):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    inputs = torch.randn(8, width, generator=generator)
    sgd.zero_grad()
    (model(inputs) - inputs.flip(1) * (1 + rank)).square().mean().backward()
    sgd.step()


def weights(model):
    return b"".join(one.detach().numpy().tobytes() for one in model.parameters())


def outer_state(rank):
    fragments = rank.outer.state_dict()["fragments"]
    kept = [one[key] for one in fragments for key in ("outer", "velocity", "residual")]
    return [one.numpy().tobytes() for one in kept if one is not None]


def outer_steps(rank):
    """How many outer steps of its first fragment a rank has."""
    return rank.outer.state_dict()["fragments"][0]["made"]


class Expected:
    """The same training by NumPy, all ranks in one place.

    Outer steps as in arXiv 2501.18512: fragments take turns, and are merged after a delay. With two
    differences: the mean is of the ranks that take part, weighted by their tokens, and a rank that
    is left out goes on from where it is.
    """

    def __init__(self, ranks, settings):
        alpha = 0.5 if settings.get("delay") else 0.0
        defaults = {"fragments": 1, "delay": 0, "skipped": 0, "lr": 0.7, "momentum": 0.9}
        self.settings = {**defaults, "alpha": alpha, **settings}
        self.models = [layers() for _ in range(ranks)]
        self.own = [torch.optim.SGD(one.parameters(), lr=0.1) for one in self.models]
        count = self.settings["fragments"]
        # Two halves of a model of two like layers, or all of it.
        self.fragments = [
            list(range(4 // count * at, 4 // count * (at + 1))) for at in range(count)
        ]
        self.outer = [self.parameters(rank) for rank in range(ranks)]
        self.velocity = [[np.zeros_like(one) for one in outer] for outer in self.outer]
        self.made = [0] * ranks
        self.tokens = [0.0] * ranks

    def parameters(self, rank):
        return [one.detach().numpy().copy() for one in self.models[rank].parameters()]

    def learn(self, rank, step, tokens=0.0):
        own_step(self.models[rank], self.own[rank], rank, step, 6)
        self.tokens[rank] += tokens

    def train(self, steps):
        every, delay = self.settings["every"], self.settings["delay"]
        everybody, due = range(len(self.models)), {}
        for step in range(1, steps + 1):
            for rank in everybody:
                self.learn(rank, step - 1)
            if delay and step in due:
                self.merge(*due.pop(step))
            for at in range(len(self.fragments)):
                begins = step % every == (at + 1) * every // len(self.fragments) % every
                if begins and step != self.settings["skipped"]:
                    due[step + delay] = self.begin(at, everybody)
            if not delay and step in due:
                self.merge(*due.pop(step))
        return self

    def begin(self, fragment, members):
        """Have ranks send what they have learned; return it, for `merge`."""
        sent = [
            [
                outer - own
                for outer, own in zip(self.outer[rank], self.parameters(rank), strict=True)
            ]
            for rank in range(len(self.models))
        ]
        return fragment, members, sent, list(self.tokens)

    @torch.no_grad()
    def merge(self, fragment, members, sent, tokens, unheard=None):
        """Have ranks go on with the mean, but for one that does not get it."""
        momentum, lr, alpha = (F(self.settings[one]) for one in ("momentum", "lr", "alpha"))
        latest = max(members, key=lambda rank: self.made[rank])
        total = sum(tokens[rank] for rank in members)
        weights = {rank: len(members) * tokens[rank] / total if total else 1.0 for rank in members}
        for which in self.fragments[fragment]:
            first, *others = (sent[rank][which] * F(weights[rank]) for rank in members)
            mean = sum(others, first) / F(len(members))  # in the order of ranks
            before = self.outer[latest][which]
            velocity = self.velocity[latest][which] * momentum + mean
            outer = before - (mean + velocity * momentum) * lr
            for rank in members:
                own = list(self.models[rank].parameters())[which]
                if rank == unheard:
                    own.add_(torch.from_numpy(sent[rank][which]))
                    continue
                moved = own.numpy().copy()
                if self.made[rank] < self.made[latest]:
                    moved += before - self.outer[rank][which]
                merged = moved * alpha + outer * (F(1) - alpha)
                own.copy_(torch.from_numpy(merged if alpha else outer))
                self.outer[rank][which], self.velocity[rank][which] = outer, velocity
        made = self.made[latest] + 1
        for rank in members:
            self.tokens[rank] -= tokens[rank]
            self.made[rank] = self.made[rank] if rank == unheard else made

    def outer_state(self, rank=0):
        return [
            b"".join(kept[rank][which].tobytes() for which in fragment)
            for fragment in self.fragments
            for kept in (self.outer, self.velocity)
        ]


@pytest.mark.parametrize(
    "settings",
    [
        {"every": 5, "lr": 0.7, "momentum": 0.9},
        {"every": 5, "lr": 1.0, "momentum": 0.0},
        STREAMING,
        {**STREAMING, "delay": 4, "alpha": 0.0},
    ],
    ids=["plain", "local SGD", "streaming", "forgetting"],
)
def test_ranks_and_numpy_have_the_same_bits(pool, settings):
    with joined(3, servers=pool, job="outer") as clients:
        ranks = each(clients, lambda client: Rank(client, settings).train(18))
        expected = Expected(3, settings).train(18)
        assert [outer_state(rank) for rank in ranks] == [expected.outer_state()] * 3
        for rank, model in zip(ranks, expected.models, strict=True):
            own = np.frombuffer(weights(rank.model), F)
            np.testing.assert_allclose(own, np.frombuffer(weights(model), F), rtol=1e-5, atol=1e-6)


def test_ranks_begin_as_rank_0_and_end_alike(pool):
    with joined(2, servers=pool, job="outer") as clients:
        ranks = each(clients, lambda client: Rank(client, STREAMING, seed=client.rank))
        assert weights(ranks[1].model) == weights(ranks[0].model) == weights(layers(seed=0))
        each(clients, lambda client: ranks[client.rank].train(11).outer.finish())
        assert weights(ranks[1].model) == weights(ranks[0].model)
        ended = weights(ranks[0].model)
        assert ended == b"".join(outer_state(ranks[0])[::2])
        each(clients, lambda client: ranks[client.rank].outer.finish())
        assert weights(ranks[0].model) == ended, "nothing was learned since"


def test_a_checkpoint_amid_an_averaging_goes_on_with_the_same_bits(pool):
    def train(job, until, files):
        with joined(2, servers=pool, job=job, **INT8) as clients:
            made = each(clients, lambda client: Rank(client, STREAMING, WIDE))
            for rank, file in zip(made, files, strict=False):
                rank.load(file)
            each(clients, lambda client: made[client.rank].train(until))
            saved[:] = [rank.saved() for rank in made]
            return [(rank.weights, outer_state(rank)) for rank in made]

    saved = []
    whole = train("whole", 20, [])
    train("first", 11, [])
    (fragment, _) = torch.load(io.BytesIO(saved[1]), weights_only=True)[2]["fragments"]
    assert fragment["averaging"] is not None, "nothing was on its way"
    assert fragment["residual"].count_nonzero() > WIDE * WIDE // 2
    second = train("second", 20, list(saved))
    assert second == [(weights[11:], outer) for weights, outer in whole]


def test_an_averaging_that_has_failed_is_made_up_for(pool):
    settings = {"every": 5, "lr": 0.7, "momentum": 0.9}
    with joined(2, servers=pool, job="outer", timeout=1) as clients:
        ranks = each(clients, lambda client: Rank(client, settings).train(4))
        for rank in ranks:  # one after the other: the second comes too late
            with pytest.raises(ReductionTimeout):
                rank.train(5)
            rank.step += 1
        each(clients, lambda client: ranks[client.rank].train(18))
        # As if steps 5 and 10 were one averaging: the outer parameters are those of the beginning.
        expected = Expected(2, {**settings, "skipped": 5}).train(18)
        assert [outer_state(rank) for rank in ranks] == [expected.outer_state()] * 2


@pytest.mark.parametrize("fault", ["steps", "momentum"])
def test_ranks_that_differ_are_told(pool, fault):
    with joined(2, servers=pool, job="outer") as clients:
        ranks = each(clients, lambda client: Rank(client, {"every": 2}))
        before = ranks[1].outer.state_dict()
        each(clients, lambda client: ranks[client.rank].train(2))
        if fault == "steps":
            ranks[1].outer.load_state_dict({**before, "steps": 2})
        else:
            setattr(ranks[1].outer, fault, 0.5)
        outer = [outer_state(rank) for rank in ranks]

        def told(client):
            with pytest.raises(MismatchError, match="load the state of one checkpoint") as error:
                ranks[client.rank].train(4)
            assert (error.value.field, error.value.rank, error.value.other_rank) == (fault, 0, 1)

        each(clients, told)
        assert [outer_state(rank) for rank in ranks] == outer


class Fails:
    """An all-reduce that ends well, and is told to one rank as a failure."""

    def __init__(self, work):
        self._work = work

    def wait(self):
        self._work.wait()
        raise ReductionTimeout("too late at this rank", missing=())


def test_an_averaging_that_has_failed_at_one_rank_alone(pool, monkeypatch):
    # Where one fragment is merged the other one begins: after an error, too.
    settings = {"every": 2, "fragments": 2, "delay": 1}
    with joined(2, servers=pool, job="outer") as clients:
        ranks = each(clients, lambda client: Rank(client, settings).train(3))
        saved = [rank.saved() for rank in ranks]
        all_reduce = clients[0].all_reduce
        with monkeypatch.context() as patch:
            fails = lambda *given, **how: Fails(all_reduce(*given, **how))  # noqa: E731
            patch.setattr(clients[0], "all_reduce", fails)
            each(clients, lambda client: ranks[client.rank].train(4))  # the second one's begins

        def step(rank):
            """Return the field that ranks disagree on."""
            try:
                rank.train(rank.step + 1)
            except ReductionError as error:
                rank.step += 1
                return getattr(error, "field", "")
            return ""

        def told(client):
            rank = ranks[client.rank]
            return [field for _ in range(3) if (field := step(rank))]

        assert each(clients, told) == [["steps"], ["steps"]]
        one, other = (outer_state(rank) for rank in ranks)
        assert one[:2] == other[:2], "the other fragment goes on"
        assert one[2:] != other[2:]
        for rank, file in zip(ranks, saved, strict=True):
            rank.load(file)
        each(clients, lambda client: ranks[client.rank].train(11))
        assert outer_state(ranks[0]) == outer_state(ranks[1])


def test_an_interrupt_as_an_averaging_begins_leaves_the_ranks_in_step(pool, monkeypatch):
    with joined(2, servers=pool, job="outer", timeout=5) as clients:
        ranks = each(clients, lambda client: Rank(client, {"every": 2}).train(1))

        def interrupted(*given, **how):
            clients[0].decline(KeyboardInterrupt())  # as a call does in which it comes
            raise KeyboardInterrupt

        def told(client):
            expected = MismatchError if client.rank else KeyboardInterrupt
            with pytest.raises(expected):
                ranks[client.rank].train(2)
            ranks[client.rank].step += 1

        with monkeypatch.context() as patch:
            patch.setattr(clients[0], "all_reduce", interrupted)
            each(clients, told)
        each(clients, lambda client: ranks[client.rank].train(4))
        assert outer_state(ranks[0]) == outer_state(ranks[1])


def test_small_steps_add_up_in_types_of_16_bits(pool):
    def train(client):
        layer = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        outer = OuterOptimizer(layer, client, every=1, lr=1.0, momentum=0.0)
        for _ in range(8):
            with torch.no_grad():  # by half of what the type can tell apart there, in the mean
                layer.weight.add_(2.0**-7 if client.rank == 0 else 0.0)
            outer.step()
        return layer.weight.item()

    with joined(2, servers=pool, job="outer") as clients:
        assert each(clients, train) == [1 + 8 * 2.0**-8] * 2


def test_ranks_must_agree_at_the_beginning(pool):
    with joined(2, servers=pool, job="outer") as clients:

        def told(client):
            said = "ranks disagree on every: rank 0 says 2, rank 1 says 3"
            with pytest.raises(MismatchError, match=said):
                Rank(client, {"every": 2 + client.rank})

        each(clients, told)


def test_a_rank_joins_with_the_outer_state_of_the_others(pool):
    settings = {**STREAMING, "delay": 1}
    how = {"servers": pool, "job": "outer", "on_rank_lost": "continue", **INT8}

    def train(rank):
        with_newcomer = 0
        while with_newcomer < 20:
            if not rank.outer.averaging:
                common = elastic.sync(
                    rank.model, rank.sgd, client=rank.client, outer=rank.outer, step=rank.step
                )
                rank.step = rank.step if common is None else common["step"]
            rank.train(rank.step + 1)
            with_newcomer += rank.client.present == (0, 1, 2)
        rank.outer.finish()
        return weights(rank.model), rank.step

    def join():
        with connect(join=True, **how) as client:
            return train(Rank(client, settings, WIDE, seed=3))

    with joined(2, **how) as clients, ThreadPoolExecutor(1) as later:
        ranks = each(clients, lambda client: Rank(client, settings, WIDE).train(9))
        newcomer = later.submit(join)
        ended = each(clients, lambda client: train(ranks[client.rank]))
        assert ended == [newcomer.result(30)] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, "give the number of steps between two outer ones"),
        ({"every": 3, "fragments": 4}, "fragments=4: give 1 to 3"),
        ({"every": 3, "delay": 4}, "delay=4: give 0 to 3"),
        ({"every": 3, "alpha": 1.0}, "alpha=1.0: give 0 to less than 1"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(ConfigError, match=said):
        OuterOptimizer(layers(), **arguments)


def test_wrong_models(pool, monkeypatch):
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        OuterOptimizer(layers().requires_grad_(False), every=1)
    with pytest.raises(ConfigError, match="neither complex ones nor DTensors"):
        OuterOptimizer(nn.Linear(2, 2, dtype=torch.complex64), every=1)
    with joined(1, servers=pool, job="outer") as (client,):
        state = Rank(client, {"every": 3}).outer.state_dict()
        with monkeypatch.context() as patch:
            patch.setattr(Client, "newcomer", True)  # of others, who have trained before
            joining = Rank(client, {"every": 4}).outer
        with pytest.raises(ConfigError, match="have every=3, and this one every=4"):
            joining.load_state_dict(state)
        with pytest.raises(ConfigError, match=r"of 1 fragments of \[84\] values, and this model"):
            Rank(client, STREAMING).outer.load_state_dict(state)
