"""The pool that needs no pool: every rank hosts a reducer thread for its share of each buffer."""

from __future__ import annotations

import json
import logging
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from reducer.units import address, host_port, is_loopback
from reducer.zmtp._keys import make_pair
from worker_client import config
from worker_client.client.interfaces import (
    addresses,
    choose,
    described,
    outward,
    towards,
    unresolved,
)
from worker_client.communicators.placement import host_identity
from worker_client.runtime.credentials import Curve
from worker_client.runtime.service_thread import close_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from reducer.config import ReducerConfig
    from reducer.keyfiles import KeyPair
    from reducer.runtime.keyring import Keyring
    from reducer.server import Server
    from worker_client.client.rendezvous import Rendezvous

SECRET_BYTES = 32  # as many as the proofs' hash has
LOOPBACK = "127.0.0.1"
_ANYWHERE = {"0.0.0.0", "::"}  # noqa: S104 (recognised, not bound)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hosted:
    """The reducers of all ranks.

    Attributes:
        server: this rank's.
        addresses: of all, in rank order.
        curves: keys for each reducer thread's address; None where nothing is encrypted.
        secret: the job's, with which ranks and reducers answer each other's challenges.
    """

    server: Server
    addresses: tuple[str, ...]
    curves: Mapping[str, Curve | None]
    secret: bytes = field(repr=False)


def start(group: Rendezvous, interface: str, *, encrypt: bool) -> Hosted:
    """Start this rank's reducer and learn where those of the others are.

    They admit the ranks of this group alone, to which its store gives a secret of the job. This
    rank's listens at `interface`, as of `choose`, or on the way to the other ranks. With `encrypt`
    they have keys as well, made here, where other machines can reach a reducer.

    Raises:
        ConfigError: at this rank or another one a setting of the reducer is wrong or its port is
            taken, or there is no such interface, or no address that ranks on other hosts can reach.
    """
    # The one place where a worker runs a reducer's code; most workers never load it.
    from reducer.server import Server  # noqa: PLC0415

    settings = _settings(group, interface)
    if group.rank == 0:
        group.share("secret", secrets.token_hex(SECRET_BYTES))
    secret = bytes.fromhex(group.read("secret", 0))
    mine = make_pair()
    others = group.gather("key", mine.public)
    pair = make_pair() if encrypt and not is_loopback(settings.bind) else None
    started: list[Server] = []

    def serve() -> str:
        server = Server(settings, None if pair is None else _keyring(pair, others), secret)
        server.start()
        started.append(server)
        close_in_child(server, _descriptors)
        return json.dumps([server.address, list(server.lanes), pair and pair.public])

    try:
        offers = [json.loads(offer) for offer in group.gather_made("reducer", serve)]
        if group.rank == 0:
            group.withdraw("secret")  # who offers a reducer has read it
    except BaseException:
        for server in started:
            server.stop()
        raise
    log.info(
        "embedded: each of %d ranks hosts a reducer%s",
        len(offers),
        " and encrypts" * (pair is not None),
    )
    curves = {
        lane: None if public is None else Curve(public, mine.secret)
        for _, lanes, public in offers
        for lane in lanes
    }
    return Hosted(started[0], tuple(first for first, _, _ in offers), curves, secret)


def reserve(interface: str, way: str) -> Server:
    """Take an address for this rank's reducer, which serves once it is started.

    A rank that connects before that waits.

    Args:
        interface: as of `choose`; "" for REDUCTION_BIND's address, if it has one.
        way: this machine's address on the way to the other ranks, if both say nothing.

    Raises:
        ConfigError: a setting of the reducer is wrong or its port is taken, or there is no such
            interface.
    """
    from reducer import config as reducer_config  # noqa: PLC0415 (as above)
    from reducer.server import Server  # noqa: PLC0415 (as above)

    settings = reducer_config.load(insecure=True)
    bind = f"tcp://{host_port(_wanted(interface, settings) or way, _given_bind(settings)[1])}"
    server = Server(settings.model_copy(update={"bind": bind}))
    close_in_child(server, _descriptors)
    return server


def _wanted(interface: str, settings: ReducerConfig) -> str:
    """Return the address at which this rank's reducer is told to listen; "" if it is told none."""
    host = choose(interface, addresses()) if interface else _given_bind(settings)[0]
    return "" if host in _ANYWHERE else host


def _descriptors(server: Server) -> Iterator[int]:
    """Yield those of what a reducer's threads listen at, and of what they have accepted there."""
    ports = {address(lane)[1] for lane in server.lanes}
    folder = Path("/proc/self/fd")
    for number in [int(path.name) for path in folder.iterdir()] if folder.is_dir() else ():
        with suppress(OSError):  # it is no socket, or was what the folder was read by
            known = socket.socket(fileno=number)
            try:
                internet = known.family in {socket.AF_INET, socket.AF_INET6}
                if internet and known.getsockname()[1] in ports:
                    yield number
            finally:
                known.detach()


def _settings(group: Rendezvous, interface: str) -> ReducerConfig:
    """Return the settings of this rank's reducer, at an address that the ranks agree on.

    Raises:
        ConfigError: at this rank or another one a setting is wrong, or there is no address that
            ranks on other hosts can reach.
    """
    from reducer import config as reducer_config  # noqa: PLC0415 (as above)

    several_hosts = len(set(group.gather("host", host_identity()))) > 1
    loaded: list[ReducerConfig] = []

    def first() -> str:
        loaded.append(reducer_config.load(insecure=True))  # it takes no strangers, without keys
        return _wanted(interface, loaded[0]) or (_on_the_way(group) if several_hosts else LOOPBACK)

    found = group.gather_made("way", first)
    own = found[group.rank]
    if several_hosts:
        meets = group.host or config.launch().master_addr or ""
        own = group.gather_made("address", lambda: _reachable(own, found, meets))[group.rank]
    bind = f"tcp://{host_port(own, _given_bind(loaded[0])[1])}"
    return loaded[0].model_copy(update={"bind": bind})


def _given_bind(settings: ReducerConfig) -> tuple[str, int]:
    """Return host and port of REDUCTION_BIND, or no host and a free port."""
    if not config.bind_is_set():
        return "", 0
    host, port = address(settings.bind)
    return host.strip("[]"), port


def _on_the_way(group: Rendezvous) -> str:
    """Return this host's address on the way to where the ranks meet; empty if they meet here."""
    for host in (group.host, config.launch().master_addr):
        own = host and towards(host)
        if own and not _leads_to_loopback(own):
            return own
    return ""


def _reachable(own: str, found: Sequence[str], meets: str) -> str:
    """Return this rank's address: `own`, or the one on the way to those that others have found.

    The name of the host where the ranks meet, `meets`, often stands for a loopback address there.

    Raises:
        ConfigError: that is loopback, or there is none.
    """
    given = own
    if not own:
        others = [host for host in found if host and not _leads_to_loopback(host)]
        ways = map(towards, others or [socket.gethostname()])
        own = next(filter(None, ways), LOOPBACK)
    if _leads_to_loopback(own):
        if not given and meets and (why := unresolved(meets)):
            raise ConfigError(
                f"{socket.gethostname()} finds no way to the other hosts: {meets!r}, where the "
                f"ranks meet, could not be resolved: {why}. Repair the name server of this "
                "machine, give MASTER_ADDR or --master-addr an address, or set "
                "REDUCTION_INTERFACE here to the network interface that leads to them (there are "
                f"{described(outward(addresses()))})"
            )
        raise ConfigError(
            f"{socket.gethostname()} has ranks of a job of several hosts, and other hosts cannot "
            f"reach {own}: set REDUCTION_INTERFACE there to the network interface that leads to "
            f"them, or at every rank to their network, such as 10.0.0.0/8 (there are "
            f"{described(outward(addresses()))})"
        )
    return own


def _leads_to_loopback(host: str) -> bool:
    return ip_address(towards(host) or LOOPBACK).is_loopback


def _keyring(pair: KeyPair, public: list[str]) -> Keyring:
    """Return keys of a reducer that admits the owner of each of these, to any job."""
    from reducer.engine.allow_list import ANY, AllowList  # noqa: PLC0415
    from reducer.runtime.keyring import Keyring  # noqa: PLC0415

    return Keyring(pair, AllowList({key: frozenset({ANY}) for key in public}))
