"""Rules of going on without ranks, and with others, each broken on purpose: a seed shows it."""

import math

from tests.memberships.training import Training
from tests.sim.rules import Mutations
from worker_client.communicators.elastic import ElasticCommunicator
from worker_client.communicators.reconcile import Reconciliation
from worker_client.communicators.replay_log import ReplayEntry, ReplayLog

MUTATIONS = Mutations(Training)
broken = MUTATIONS.broken


@MUTATIONS.instead_of(ReplayLog, "prune")
def results_forgotten_early(prune, self, _):
    """Keep no call that has ended here, though another rank may lack its result."""
    prune(self, math.inf)


@MUTATIONS.instead_of(Reconciliation, "_supply")
def results_not_supplied(*_):
    """Let calls be made again whose result a rank has."""


@MUTATIONS.instead_of(ReplayEntry, "begin")
def made_again_from_the_buffer(begin, self, ended):
    """Make a call again with what is in the buffer, where a part of a result may be."""
    self.contribution = bytes(self.operation.view)
    return begin(self, ended)


@MUTATIONS.instead_of(ReplayLog, "begin_at")
def newcomers_count_from_0(_, self, number):
    """Let a rank that joins count its calls from 0."""
    self._joins = False


@MUTATIONS.instead_of(ReplayLog, "withdraw_leaves")
def leaves_not_withdrawn(*_):
    """Make sums of leaves again that were dealt among other ranks."""
    return []


@MUTATIONS.instead_of(ElasticCommunicator, "submit")
def stale_leaves_taken(submit, self, operation):
    """Begin sums of leaves that were dealt among other ranks."""
    if operation.leaves is None:
        submit(self, operation)
    else:
        with self._gate:
            self._enter_call(ReplayEntry(operation))


@MUTATIONS.instead_of(ElasticCommunicator, "_reconcile")
def newcomers_met_at_once(reconcile, self):
    """Do not meet with those first who let ranks in, and may lack the result that says so."""
    origins, self._origins = self._origins, self._origins[-1:]
    try:
        return reconcile(self)
    finally:
        self._origins = [*origins[:-1], *self._origins]
