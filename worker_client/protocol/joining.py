"""How a worker becomes a member at every reducer: HELLO, WELCOME, lanes, refusals (sans I/O)."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from reducer.errors import AuthError, StaleGenerationError
from reducer.wire import authentication
from reducer.wire.constants import FAR_S, FEATURES, Feature, MessageType
from reducer.wire.messages import Challenge, Hello, Stream, Welcome, decode, encode
from reducer.wire.states import LinkState, Role
from worker_client.protocol.flight import AddStreams, Connect, MakeResumable, Resumption, Send
from worker_client.protocol.link import Link
from worker_client.protocol.phase import Occurrence, Phase

if TYPE_CHECKING:
    from reducer.errors import ReductionError
    from reducer.wire.header import Buffer, Header
    from worker_client.protocol.context import Context

# TCP's window grows a little each round trip, and a loss cuts it: so what one connection carries
# where there are losses goes down with the round trip. Each 25 ms bring another one, up to 8.
STREAM_S, MOST_STREAMS = 0.025, 8
RETRY_S = 0.25  # before a reducer that has refused us is asked again: often in its UNREACHABLE_S


def auto_streams(round_trip_s: float) -> int:
    """Return how many connections a link of this round trip, in seconds, is to have."""
    return min(1 + int(round_trip_s / STREAM_S), MOST_STREAMS)


def may_pass(error: ReductionError) -> bool:
    """Whether a refusal may end soon: ranks of an earlier run are still here."""
    return isinstance(error, StaleGenerationError) and error.generation == error.current


def _foreign(link: Link) -> AuthError:
    return AuthError(
        f"who answers at {link.address} does not know this job's secret, or asks for another one: "
        "another program has taken the port of a rank's reducer. Start the job again"
    )


class Joining:
    """The links of a session, from stranger to member."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._spec = context.spec
        self._links = context.links
        self._since: float | None = None  # when some reducers had welcomed us, and others had not
        self._retries: dict[int, float] = {}  # links that were refused: when to try again
        self._refused: set[int] = set()  # links that were refused last
        for reducer, address in enumerate(self._spec.reducers):
            for lane, known in enumerate([address, *self._spec.lanes.get(reducer, ())]):
                self._add(reducer, lane, known)

    @property
    def complete(self) -> bool:
        """Whether every reducer has welcomed us once, or was given up, here or by another rank."""
        return self._context.phase is not Phase.JOINING

    def complete_if_done(self) -> None:
        """Record that joining is complete, if it is."""
        if not self.complete and self.done:
            self._context.occur(Occurrence.JOINED)

    @property
    def done(self) -> bool:
        """Whether this worker is a member at every reducer that is in use."""
        used = self._context.map.uses
        return all(link.member or not used(link.reducer) for link in self._links)

    def give_up(self, now: float) -> list[int]:
        """Return the reducers to begin without, when the others have been waited for enough.

        No rank begins without one that a rank hosts: nothing replaces it, and no rank could agree.
        """
        if self.complete or not any(link.member for link in self._links):
            return []
        if self._since is None:
            self._since = now
        # Who refuses us knows more than who has been restarted: of another process, perhaps.
        begin_s = math.inf if self._refused else self._spec.begin_without_s
        if now < self._since + min(self._spec.reducers_timeout_s, begin_s):
            return []
        late = {link.reducer for link in self._links if not link.member}
        if late.isdisjoint(self._spec.hosts):
            self._context.occur(Occurrence.JOINED)
        return sorted(late.difference(self._spec.hosts))

    def hello(self, link: Link, header: Header) -> Send:
        """Introduce ourselves to a reducer that was reached."""
        link.up = True
        link.refusal = None
        link.state = LinkState.JOINING
        s = self._spec
        body = Hello(
            job=s.job,
            world_size=s.world_size,
            reducers=len(s.reducers),
            reducer_index=link.reducer,
            chunk_bytes=s.chunk_bytes,
            lane=link.lane,
            settings=dict(s.agreed),
            run=s.run,
            process=s.process,
            patience_ms=round(1000 * s.heartbeats.peer_timeout_s),
            host_name=s.host_name,
            auth=authentication.nonce() if self._has_secret(link) else "",
            features=self._features(link),
        )
        header = header._replace(window=s.window_per_reducer())
        link.hello, link.proof = (header, body), ""
        return Send(link.index, header.pack(), encode(body))

    def prove(self, link: Link, payload: Buffer) -> Send:
        """Show a reducer that we know the secret.

        Raises:
            AuthError: we know none.
        """
        challenge = decode(Challenge, payload).nonce
        if link.hello is None or not link.hello[1].auth:
            raise _foreign(link)
        header, hello = link.hello
        prove = partial(authentication.prove, self._spec.secret)
        proof = prove(Role.WORKER, header, hello, challenge, link.address)
        link.proof = prove(Role.REDUCER, header, hello, challenge, link.address)
        link.state = LinkState.JOINING
        body = replace(hello, auth=hello.auth + proof)
        return Send(link.index, header.pack(), encode(body))

    def _has_secret(self, link: Link) -> bool:
        return bool(self._spec.secret) and link.reducer in self._spec.hosts

    def welcome(self, link: Link, header: Header, payload: Buffer) -> list[Connect]:
        """Handle a WELCOME: this worker is a member; the first one names the reducer's other lanes.

        Raises:
            AuthError: it does not know the job's secret.
        """
        welcome = decode(Welcome, payload)
        if self._has_secret(link) and not (
            link.proof and authentication.proves(welcome.auth, link.proof)
        ):
            raise _foreign(link)
        link.incarnation = welcome.incarnation
        self._refused.discard(link.index)
        share = self._context.plan.share(link)
        can_grow = bool(welcome.features & Feature.CREDIT)
        self._context.flow.admit(
            link.index,
            header.window,
            share,
            link.round_trip_s,
            can_grow=can_grow,
            local=link.address in self._spec.inproc,
        )
        self._context.flight.open(link.index)
        if not welcome.features & Feature.LEAVES:
            self._context.flight.lacks_leaves = True
        link.ticket = welcome.ticket
        link.resumes = bool(welcome.features & Feature.RESUME)
        connects = []
        # Who has begun without it may learn only now what lanes it has, and ranks agree on them.
        if not self.complete or self._spec.may_lack(link.reducer):
            host = link.address.rpartition(":")[0]
            known = sum(other.reducer == link.reducer for other in self._links)
            for lane, port in enumerate(welcome.lanes[known - 1 :], known):
                connects.append(self._add(link.reducer, lane, f"{host}:{port}"))
            self.complete_if_done()
        return connects

    def connections(self, link: Link) -> list[MakeResumable | AddStreams]:
        """Ask for what a link that has been welcomed is to have besides its first connection."""
        streams = self._spec.streams or auto_streams(link.round_trip_s)
        if link.hello is None or not (link.member and link.ticket):
            return []
        header = link.hello[0]._replace(window=0, watermark=0)
        secret = self._spec.secret if self._has_secret(link) else b""
        asked: list[MakeResumable | AddStreams] = []
        if link.resumes:
            resume = header._replace(type=MessageType.RESUME)
            asked.append(MakeResumable(link.index, Resumption(resume, link.ticket, secret)))
        if streams > 1:
            payloads = []
            for number in range(1, streams):
                proof = authentication.prove_stream(secret, link.ticket, number) if secret else ""
                payloads.append(encode(Stream(link.ticket, number, proof)))
            opening = header._replace(type=MessageType.STREAM).pack()
            asked.append(AddStreams(link.index, opening, tuple(payloads)))
        return asked

    def _features(self, link: Link) -> Feature:
        features = FEATURES | (Feature(0) if self._spec.streams == 1 else Feature.STREAMS)
        far = self._spec.resumes and link.round_trip_s >= FAR_S
        return features | (Feature.RESUME if far else Feature(0))

    def refuse(self, link: Link, error: ReductionError, now: float) -> None:
        """Record that a reducer does not admit us; later it may."""
        link.refusal = error
        self._refused.add(link.index)
        if self.complete or self._spec.reducers_timeout_s < math.inf or may_pass(error):
            self._retries[link.index] = now + RETRY_S

    def retry(self, now: float) -> list[Link]:
        """Return the links whose reducers are to be asked again, over another connection."""
        due = [self._links[index] for index, at in self._retries.items() if at <= now]
        for link in due:
            del self._retries[link.index]
        return [link for link in due if link.refusal is not None]

    def endpoint(self, link: Link) -> str:
        """Return where the transport connects: ``host:port``, or an endpoint in this process."""
        return self._spec.inproc.get(link.address, link.address)

    def _add(self, reducer: int, lane: int, address: str) -> Connect:
        link = Link(len(self._links), reducer, lane, address)
        self._links.append(link)
        window = self._spec.window_per_reducer()
        hosted = reducer in self._spec.hosts
        self._context.flight.add_link(window, self._spec.keeps(reducer), in_place=hosted)
        self._context.plan.use(self._links, self._context.map.lanes)
        return Connect(self.endpoint(link))
