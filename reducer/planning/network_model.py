"""How long network cards are busy with an all-reduce: arithmetic, nothing measured.

**The model.** Every machine has one network card that carries its rate in each direction at once.
An all-reduce takes as long as the busiest card needs for its bytes, and the pipeline of chunks has
to fill and to drain: see `card_times`. Processors cost nothing, and nobody else uses the links.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, NamedTuple, TypeAlias

from reducer.errors import ConfigError
from reducer.wire.constants import HEADER_BYTES
from reducer.wire.layout import (
    LARGEST_CHUNK,
    MIN_SHARD,
    chunk_size,
    chunk_size_of,
    mixed_weights,
)

Topology: TypeAlias = Literal["embedded", "pool", "mixed"]

MTU = 1500  # bytes of a packet, without the Ethernet header
PACKET_HEADERS = 52  # bytes of IPv4 and of TCP with time stamps, part of the MTU
FRAME_HEADER = 14  # bytes of Ethernet, not part of it
FRAMING = 2 + 9  # bytes by which ZeroMQ frames a header and a large payload


class Network(NamedTuple):
    """The cards of a job, and the way between them.

    Attributes:
        worker_rate, reducer_rate: payload that a card carries each way, bytes per second.
        round_trip_s: of the network when nothing else is on it.
    """

    worker_rate: float
    reducer_rate: float
    round_trip_s: float = 0.0


class Shares(NamedTuple):
    """What one reducer owns of every buffer, 0 to 1.

    Attributes:
        pool: each of the pool's.
        ranks: each of those that workers host.
    """

    pool: Fraction
    ranks: Fraction


class Times(NamedTuple):
    """How long a card is busy, and how long it waits, seconds."""

    busy_s: float
    idle_s: float


def payload_share(mtu: int = MTU) -> float:
    """Return the part of an Ethernet link's bytes that TCP has for payload: 0.956 with 1500."""
    return (mtu - PACKET_HEADERS) / (mtu + FRAME_HEADER)


def shares(workers: int, reducers: int, topology: Topology) -> Shares:
    """Return what each reducer owns.

    Raises:
        ConfigError: there is no such topology with so many reducers.
    """
    if topology == "pool":
        if not reducers:
            raise ConfigError("a pool needs at least 1 reducer")
        return Shares(Fraction(1, reducers), Fraction(0))
    weights = mixed_weights(workers, reducers if topology == "mixed" else 0)
    whole = sum(weights)
    return Shares(
        Fraction(weights[0] if topology == "mixed" else 0, whole), Fraction(weights[-1], whole)
    )


def busiest_card_s(workers: int, owned: Shares, network: Network) -> float:
    """Return how long the busiest card is busy for each byte of a buffer, each way, seconds.

    A reducer of the pool takes its share from all n workers, and sends as much. A worker sends
    what it does not own itself, and receives the same from the n - 1 others for what it owns:
    1 - w + (n-1)w of a buffer, each way.
    """
    pool = workers * float(owned.pool) / network.reducer_rate
    rank = (1 + (workers - 2) * float(owned.ranks)) / network.worker_rate
    return max(pool, rank if owned.ranks else 1 / network.worker_rate)


def ring_factor(workers: int) -> float:
    """Return what a ring carries through each card, of a buffer's bytes: ``2(n-1)/n``."""
    return 2 * (workers - 1) / workers


def ring_times(nbytes: float, workers: int, network: Network) -> Times:
    """Return what a ring's cards do: ``2(n-1)`` steps of an n-th part, one after another.

    Each step also costs half a round trip.
    """
    steps = 2 * (workers - 1)
    return Times(nbytes * steps / workers / network.worker_rate, steps * network.round_trip_s / 2)


def ring_s(nbytes: float, workers: int, network: Network) -> float:
    """Return the time of a ring's all-reduce."""
    return sum(ring_times(nbytes, workers, network))


def card_times(
    nbytes: float, workers: int, reducers: int, topology: Topology, network: Network
) -> Times:
    """Return what the busiest card does in an all-reduce through reducers.

    A wave is one chunk of every shard, from all ranks. Cards share their rate fairly among
    connections, so the contributions of a wave are all there when it ends, and not before. Its
    results travel beside the contributions of the next wave. So m waves up and m waves down take
    m + 1 of them: each direction of a card is busy with its bytes, and rests for one wave and a
    round trip (the time of a pipeline of two stages). A shard of one chunk takes two waves.

    An embedded job hardly rests at all: its cards send contributions and results alike, so the
    second stage is part of their bytes. In a mixed topology reducers own what `mixed_weights` says,
    which is best for cards of one rate. Of a small buffer few reducers own `MIN_SHARD` each.

    Cards that take turns of whole segments make a wave end later, at some reducers more than at
    others. That depends on the order of turns, which `reducer.planning.simulation` has.
    """
    owned = shares(workers, reducers, topology)
    owners = (reducers if owned.pool else 0) + (workers if owned.ranks else 0)
    most = max(1, math.ceil(nbytes / MIN_SHARD))
    if most < owners:
        owners = most
        owned = Shares(*(Fraction(1, most) if share else share for share in owned))
    byte_s = busiest_card_s(workers, owned, network)
    most_bytes = LARGEST_CHUNK
    if owned.pool:  # ranks measure what their links carry to reducers, and agree on it
        most_bytes = chunk_size_of(int(nbytes), owners, chunk_size(1 / byte_s))
    shard = float(max(owned)) * nbytes
    chunk = min(most_bytes, shard)
    busy = nbytes * (1 + (HEADER_BYTES + FRAMING) / chunk) * byte_s
    wave = busy * chunk / shard
    return Times(busy, (wave if owned.pool else 0.0) + network.round_trip_s)


def all_reduce_s(
    nbytes: float, workers: int, reducers: int, topology: Topology, network: Network
) -> float:
    """Return the time of an all-reduce; the arguments are those of `card_times`."""
    return sum(card_times(nbytes, workers, reducers, topology, network))


def fastest(nbytes: float, workers: int, reducers: int, network: Network) -> tuple[float, Topology]:
    """Return the least time that a pool of k allows, and how."""
    kinds: list[Topology] = ["pool"] if reducers else ["embedded"]
    if 0 < reducers < workers:
        kinds.append("mixed")
    return min((all_reduce_s(nbytes, workers, reducers, kind, network), kind) for kind in kinds)
