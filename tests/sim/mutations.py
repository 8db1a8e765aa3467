"""Rules of sessions and engines that are broken on purpose, with the compiled parts' oracles."""

from dataclasses import replace
from functools import partial

from reducer.engine import engine, rounds
from reducer.engine.actions import Send
from reducer.engine.engine import Engine
from reducer.engine.membership import Members
from reducer.wire.constants import MAX_LANES, MessageType
from reducer.wire.header import Header
from reducer.wire.layout import cost
from reducer.wire.messages import Stream, decode, encode
from tests.sim.rules import Mutations
from tests.sim.world import Flight, World
from tests.twins.slots import Round
from worker_client.protocol.failover import Failover
from worker_client.protocol.flight import Resumption
from worker_client.protocol.joining import Joining, Occurrence
from worker_client.protocol.lifecycle import Aborts, Calls, Numbering
from worker_client.protocol.session import Session
from worker_client.protocol.shard_map import ShardMap, ShardPlan, Stage

MUTATIONS = Mutations(partial(World, implementation="plain"))
MUTATIONS["rank-lost-at-once"] = engine, "UNREACHABLE_S", 0.0
broken = MUTATIONS.broken


def hosting(world):
    return world.hosts


def breaking(world):
    """Connections to busy hosts break, and nothing else happens: reducers are met again."""
    alone = world.hosts and not world.pool and world.late
    return alone and world.faults.kinds == ("break_connection",)


def rolling(world):
    return world.faults.rolling


def two_lanes(world):
    return world.lanes > 1


def far(world):
    return world.far


@MUTATIONS.instead_of(Round, "holds")
def no_duplicate_check(*_):
    """Count every contribution, also a repeated one."""
    return False


@MUTATIONS.instead_of(ShardMap, "lose")
def no_epoch_check(_, self, reducer, stage):
    """Take every loss for one of the present epoch, whatever it is told for."""
    self._lost[reducer] = max(Stage(self.epoch), self._lost[reducer])


@MUTATIONS.instead_of(Flight, "take")
def results_freed_early(take, self, *arguments):
    """Free results as soon as they are here, though other ranks may lack them."""
    done = take(self, *arguments)
    if done:
        self.confirm(self.watermark)
    return done


@MUTATIONS.instead_of(Flight, "refill")
def window_before_order(refill, self, now):
    """Let no chunk that precedes those in flight go beyond the window."""
    waiting = {at: send for at, send in vars(self).pop("waiting", {}).items() if self.expects(*at)}
    for send in refill(self, now):
        header = Header.unpack(send.header)
        waiting[send.link, header.sequence, header.offset] = send
    sent = []
    for at, send in list(waiting.items()):
        its = self.stats(send.link)
        behind = [cost(len(one.payload)) for one in waiting.values() if one.link == send.link]
        flying = its.in_flight - sum(behind)
        if not flying or flying + cost(len(send.payload)) <= its.window:
            sent.append(waiting.pop(at))
    self.waiting = waiting
    return sent


@MUTATIONS.instead_of(Numbering, "give")
def refusals_unnumbered(give, self, operation):
    """Let a call that is refused at this rank use up no number."""
    if operation.refusal is None:
        give(self, operation)
    else:
        operation.sequence = self.end


@MUTATIONS.instead_of(Calls, "_others")
def failures_alone(*_):
    """Let the other all-reduces of a failed call go on."""
    return []


@MUTATIONS.instead_of(rounds, "_skipped_agreement")
def questions_not_declined(*_):
    """Let a question wait for ranks that have gone on without it."""


@MUTATIONS.instead_of(ShardMap, "stage", where=rolling)
def nobody_adopted(stage_of, self, epoch=None):
    """Give up when no reducer of an epoch is left, though others answer."""
    stage = stage_of(self, epoch)
    return stage if stage is not None and stage.number == 0 else None


@MUTATIONS.instead_of(Failover, "_claim_all", where=rolling)
def adopted_unclaimed(*_):
    """Keep to ourselves the results that others lack, when a reducer takes all."""
    return []


@MUTATIONS.instead_of(Aborts, "welcomed", where=breaking)
def failures_untold(*_):
    """Do not tell a new reducer of what has failed here."""


@MUTATIONS.instead_of(Failover, "_take_out", where=rolling)
def another_process_lost(take_out, self, reducer, stage, present, _):
    """Leave a reducer also if another process of it was lost than is there."""
    return take_out(self, reducer, stage, present, "")


@MUTATIONS.instead_of(Session, "submit")
def calls_uncounted(submit, self, operation, now):
    """Number all-reduces one by one, however many a call has."""
    operation.call = None
    return submit(self, operation, now)


@MUTATIONS.instead_of(Joining, "give_up", where=hosting)
def two_maps(give_up, self, now):
    """Begin without reducers that ranks host, of which other ranks take no notice."""
    late = give_up(self, now)
    if self._since is not None and now >= self._since + self._spec.begin_without_s:
        self._context.occur(Occurrence.JOINED)
        late = [link.reducer for link in self._links if not link.member]
    return late


@MUTATIONS.instead_of(ShardPlan, "use", where=two_lanes)
def lanes_not_agreed(use, self, links, taking_part):
    """Cut buffers between all lanes that this rank knows of, whatever others know."""
    use(self, links, dict.fromkeys(taking_part, MAX_LANES))


@MUTATIONS.instead_of(Members, "find", where=far)
def streams_of_strangers(find, self, peer):
    """Take further streams of links for strangers, though the reducer has agreed to them."""
    found = find(self, peer)
    return found if found is None or found[1].peer == peer else None


@MUTATIONS.instead_of(Engine, "_credit", where=far)
def credit_not_set_aside(_, self, job, member, header, payload):
    """Grant a window without setting it aside."""
    return [Send(member.peer, Header(MessageType.CREDIT, window=header.window).pack(), None)]


@MUTATIONS.instead_of(Engine, "_resume", where=far)
def another_goes_on(resume, self, peer, header, payload, *key):
    """Go on with a link's first connection, whichever has broken."""
    said = decode(Stream, payload)
    return resume(self, peer, header, encode(replace(said, number=0)), *key)


@MUTATIONS.instead_of(Resumption, "message", where=far)
def all_sent_again(message, self, number, attempt, _):
    """Ask a reducer for all that it has ever sent over a connection."""
    return message(self, number, attempt, 0)
