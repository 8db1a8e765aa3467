"""Rules that are broken on purpose: a simulator that does not notice would show nothing."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from reducer.engine import engine, rounds
from reducer.engine.engine import Engine
from reducer.engine.jobs import Membership
from reducer.engine.rounds import Send
from reducer.engine.slots import Round
from reducer.wire.constants import MAX_LANES, MessageType
from reducer.wire.header import Header
from reducer.wire.messages import Stream, decode, encode
from worker_client.protocol.failover import Failover
from worker_client.protocol.flight import Resumption
from worker_client.protocol.joining import Joining
from worker_client.protocol.lifecycle import Aborts, Calls, Numbering
from worker_client.protocol.plain_flight import PlainFlight
from worker_client.protocol.shard_map import Plan, ShardMap, Stage

_end_well = PlainFlight.take
_next = PlainFlight._next
_give_number = Numbering.give
_give_up = Joining.give_up
_resume = Engine._resume
_say_resume = Resumption.message
_stage = ShardMap.stage
_take_out = Failover._take_out
_use = Plan.use


def _no_duplicates(self, offset, rank):
    """Count every contribution, also a repeated one."""
    del self, offset, rank
    return False


def _no_epochs(self, reducer, stage):
    """Take every loss for one of the present epoch, whatever it is told for."""
    del stage
    self._lost[reducer] = max(Stage(self.epoch), self._lost[reducer])


def _free_results(self, *arguments):
    """Free results as soon as they are here, though other ranks may lack them."""
    done = _end_well(self, *arguments)
    for sequence in done or ():
        if sequence in self._ended:
            self._release(self._ended.pop(sequence))
    return done


def _first_come(self, index, now):
    """Let no chunk that precedes those in flight go beyond the window."""
    link = self._links[index]
    full = link.flying and link.in_flight + 1024 > link.window
    return None if full else _next(self, index, now)


def _number_what_is_done(self, operation):
    """Let a call that is refused at this rank use up no number."""
    _give_number(self, operation)
    self.number -= operation.refusal is not None


def _fail_alone(self, operation):
    """Let the other all-reduces of a failed call go on."""
    del self, operation
    return []


def _only_the_first_stage(self, epoch=None):
    """Give up when no reducer of an epoch is left, though others answer."""
    stage = _stage(self, epoch)
    return stage if stage is not None and stage.number == 0 else None


def _claim_nothing(self, link):
    """Keep to ourselves the results that others lack, when a reducer takes all."""
    del self, link
    return []


def _tell_nothing(self, link):
    """Do not tell a new reducer of what has failed here."""
    del self, link


def _leave_whatever_was_lost(self, reducer, stage, present, process):
    """Leave a reducer also if another process of it was lost than is there."""
    del process
    return _take_out(self, reducer, stage, present, "")


def _number_by_place(self, operation):
    """Number all-reduces one by one, however many a call has."""
    operation.call = None
    _give_number(self, operation)


def _decline_nothing(question, call):
    """Let a question wait for ranks that have gone on without it."""
    del question, call


def _give_up_hosts(self, now):
    """Begin without reducers that ranks host, of which other ranks take no notice."""
    late = _give_up(self, now)
    if self._since is not None and now >= self._since + self._spec.begin_without_s:
        self.complete = True
        late = [link.reducer for link in self._links if not link.member]
    return late


def _use_all_known_lanes(self, links, taking_part):
    """Cut buffers between all lanes that this rank knows of, whatever others know."""
    _use(self, links, dict.fromkeys(taking_part, MAX_LANES))


def _take_for_strangers(self, peer):
    """Take further streams of links for strangers, though the reducer has agreed to them."""
    del self
    return peer


def _grant_what_is_asked(self, job, member, header, payload):
    """Grant a window without setting it aside."""
    del self, job, payload
    return [Send(member.peer, Header(MessageType.CREDIT, window=header.window).pack(), None)]


def _go_on_with_the_first(self, peer, header, payload, key):
    """Go on with a link's first connection, whichever has broken."""
    said = decode(Stream, payload)
    return _resume(self, peer, header, encode(replace(said, number=0)), key)


def _go_on_from_the_start(self, number, attempt, read):
    """Ask a reducer for all that it has ever sent over a connection."""
    del read
    return _say_resume(self, number, attempt, 0)


class Mutation(NamedTuple):
    """One broken rule.

    Attributes:
        owner: of the rule, a class or a module.
        name: of its attribute.
        instead: what replaces it.
        seed: one that notices, to be tried first. `python -m tests.sim --mutations` finds another
            one when the worlds of seeds have changed.
    """

    owner: Any
    name: str
    instead: Any
    seed: int


MUTATIONS = {
    "no-duplicate-check": Mutation(Round, "holds", _no_duplicates, seed=2),
    "no-epoch-check": Mutation(ShardMap, "lose", _no_epochs, seed=15),
    "results-freed-early": Mutation(PlainFlight, "take", _free_results, seed=0),
    "window-before-order": Mutation(PlainFlight, "_next", _first_come, seed=12),
    "rank-lost-at-once": Mutation(engine, "AWAY_S", 0.0, seed=166),
    "refusals-unnumbered": Mutation(Numbering, "give", _number_what_is_done, seed=1),
    "failures-alone": Mutation(Calls, "_others", _fail_alone, seed=1),
    "questions-not-declined": Mutation(rounds, "_unasked", _decline_nothing, seed=14),
    "nobody-adopted": Mutation(ShardMap, "stage", _only_the_first_stage, seed=10),
    "adopted-unclaimed": Mutation(Failover, "_claim_all", _claim_nothing, seed=60),
    "failures-untold": Mutation(Aborts, "welcomed", _tell_nothing, seed=124),
    "another-process-lost": Mutation(Failover, "_take_out", _leave_whatever_was_lost, seed=204),
    "calls-uncounted": Mutation(Numbering, "give", _number_by_place, seed=1),
    "two-maps": Mutation(Joining, "give_up", _give_up_hosts, seed=15),
    "lanes-not-agreed": Mutation(Plan, "use", _use_all_known_lanes, seed=15),
    "streams-of-strangers": Mutation(Membership, "main", _take_for_strangers, seed=4),
    "credit-not-set-aside": Mutation(Engine, "_credit", _grant_what_is_asked, seed=10),
    "another-goes-on": Mutation(Engine, "_resume", _go_on_with_the_first, seed=7),
    "all-sent-again": Mutation(Resumption, "message", _go_on_from_the_start, seed=7),
}


@contextmanager
def broken(name):
    """Break one rule in the plain implementation."""
    mutation = MUTATIONS[name]
    with patch.object(mutation.owner, mutation.name, mutation.instead):
        yield


def first_caught(name, seeds, run):
    """Return the first seed that notices, and how; None if none does.

    Args:
        name: of the mutation.
        seeds: to try.
        run: runs a seed and returns what went wrong, or nothing.
    """
    with broken(name):
        for seed in seeds:
            if story := run(seed):
                return seed, story
    return None
