"""Rules of going on without ranks, and with others, each broken on purpose: a seed shows it."""

import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from worker_client.communicators.elastic import ElasticCommunicator
from worker_client.communicators.reconcile import Reconciliation
from worker_client.communicators.replay_log import Entry, ReplayLog

prune, begin, reconcile = ReplayLog.prune, Entry.begin, ElasticCommunicator._reconcile


def _forget_at_once(self, reached):
    """Keep no call that has ended here, though another rank may lack its result."""
    del reached
    prune(self, math.inf)


def _supply_nothing(*_):
    """Let calls be made again whose result a rank has."""


def _begin_from_the_buffer(self, ended):
    """Make a call again with what is in the buffer, where a part of a result may be."""
    self.contribution = bytes(self.operation.view)
    return begin(self, ended)


def _join_at_zero(self, number):
    """Let a rank that joins count its calls from 0."""
    del number
    self._joins = False


def _meet_with_newcomers_at_once(self):
    """Do not meet with those first who let ranks in, and may lack the result that says so."""
    origins, self._origins = self._origins, self._origins[-1:]
    try:
        return reconcile(self)
    finally:
        self._origins = [*origins[:-1], *self._origins]


class Mutation(NamedTuple):
    """A rule that is broken: a method, and what stands in its place."""

    where: type
    name: str
    by: Callable[..., Any]


MUTATIONS = {
    "results-forgotten-early": Mutation(ReplayLog, "prune", _forget_at_once),
    "results-not-supplied": Mutation(Reconciliation, "_supply", _supply_nothing),
    "made-again-from-the-buffer": Mutation(Entry, "begin", _begin_from_the_buffer),
    "newcomers-count-from-0": Mutation(ReplayLog, "begin_at", _join_at_zero),
    "newcomers-met-at-once": Mutation(
        ElasticCommunicator, "_reconcile", _meet_with_newcomers_at_once
    ),
}


@contextmanager
def broken(name):
    """Break a rule for as long as this lasts."""
    mutation = MUTATIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mutation.where, mutation.name, mutation.by)
        yield
