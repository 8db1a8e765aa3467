"""Whom a reducer admits: by a key on its allow-list, and a proof of its secret (sans I/O).

The rules are those of `docs/protocol.md`, sections 5 and 10.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from reducer.engine.actions import Send
from reducer.engine.membership import JoinRequest
from reducer.errors import AuthError
from reducer.wire import authentication
from reducer.wire.constants import FEATURES, NONCE_DIGITS, MessageType
from reducer.wire.header import Header
from reducer.wire.messages import Challenge, Welcome, encode
from reducer.wire.states import Role

if TYPE_CHECKING:
    from reducer.engine.allow_list import AllowList
    from reducer.engine.jobs import Job
    from reducer.engine.slots import Member
    from reducer.wire.messages import Hello, Stream

MAX_NONCES = 4096


class ReducerIdentity(NamedTuple):
    """What a reducer, or one thread of it, says of itself.

    Attributes:
        incarnation: hexadecimal, another one at every start.
        address: how it calls itself in errors, ``host:port``.
        lanes: ports of the reducer's other threads, told to every worker.
        features: what it speaks.
    """

    incarnation: str
    address: str
    lanes: tuple[int, ...] = ()
    features: int = FEATURES


class Admission:
    """Asks peers for what they have to show, and shows what they ask for.

    `allowed` is None for everybody, and may be replaced; `secret` is empty if there is none.
    """

    def __init__(self, identity: ReducerIdentity, allowed: AllowList | None, secret: bytes) -> None:
        self.identity = identity
        self.allowed = allowed
        self.secret = secret
        self._nonces: dict[bytes, str] = {}  # that peers have been asked with, until they answer

    def admit(self, peer: bytes, header: Header, hello: Hello, key: str) -> JoinRequest | Send:
        """Return what a peer may join with, or the CHALLENGE that it has to answer before.

        Raises:
            AuthError: its key is not allowed, or it does not know the secret.
        """
        refusal = None if self.allowed is None else self.allowed.refusal(key, hello.job)
        if refusal is not None:
            raise refusal
        challenge = self._nonces.pop(peer, "") if self.secret else ""
        request = JoinRequest(peer, header, hello, key, challenge)
        if self.secret and not self._is_proven(request):
            return self._challenge(peer, header)
        return request

    def welcome(self, request: JoinRequest, job: Job, member: Member, ticket: str) -> Send:
        """Return the WELCOME of a new member."""
        hello, identity = request.hello, self.identity
        header = Header(
            MessageType.WELCOME,
            job=job.key,
            generation=job.generation,
            rank=member.rank,
            window=member.window,
        )
        body = Welcome(
            incarnation=identity.incarnation,
            max_chunk_bytes=job.max_chunk_bytes,
            lanes=identity.lanes if hello.lane == 0 else (),
            auth=self._proof(Role.REDUCER, request) if self.secret else "",
            ticket=ticket,
            features=hello.features & identity.features,
        )
        return Send(request.peer, header.pack(), encode(body))

    def check_connection(self, header: Header, said: Stream) -> None:
        """Check the proof of a STREAM or RESUME.

        Raises:
            AuthError: its sender does not know the secret.
        """
        if not self.secret:
            return
        words = (self.secret, said.ticket, said.number)
        if header.type is MessageType.STREAM:
            expected = authentication.prove_stream(*words)
        else:
            expected = authentication.prove_resume(*words, said.attempt, header.offset)
        if not authentication.proves(said.auth, expected):
            name = header.type.name
            raise AuthError(f"who says {name} has to prove that it knows the secret")

    def _challenge(self, peer: bytes, header: Header) -> Send:
        """Ask for a proof, with a nonce for one HELLO."""
        if len(self._nonces) >= MAX_NONCES:
            del self._nonces[next(iter(self._nonces))]  # who has it is asked again
        nonce = self._nonces[peer] = authentication.nonce()
        ask = header._replace(type=MessageType.CHALLENGE, watermark=0, window=0)
        return Send(peer, ask.pack(), encode(Challenge(nonce)))

    def _proof(self, speaker: Role, request: JoinRequest) -> str:
        _, header, hello, _, challenge = request
        address = self.identity.address
        return authentication.prove(self.secret, speaker, header, hello, challenge, address)

    def _is_proven(self, request: JoinRequest) -> bool:
        """Whether a HELLO shows that its sender knows the secret; False: it has yet to be asked.

        Raises:
            AuthError: it shows that its sender does not.
        """
        auth = request.hello.auth
        shown = auth[NONCE_DIGITS:]
        if auth and not (shown and request.challenge):
            return False
        if not authentication.proves(shown, self._proof(Role.WORKER, request)):
            raise AuthError(
                "this reducer belongs to a job whose secret this worker does not know: ranks that "
                "host reducers learn it from the store of their own process group. Another program "
                "needs reducers of a pool: name these in REDUCTION_SERVERS"
            )
        return True
