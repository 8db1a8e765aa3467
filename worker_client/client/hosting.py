"""The pool that needs no pool: every rank hosts a reducer thread for its share of each buffer."""

from __future__ import annotations

import ipaddress
import json
import logging
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from worker_client import config
from worker_client.client.interfaces import addresses, choose
from worker_client.communicators.placement import host_identity
from worker_client.runtime.credentials import Curve, make_pair
from worker_client.runtime.service_thread import close_in_child

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from reducer.config import ReducerConfig
    from reducer.keyfiles import KeyPair
    from reducer.runtime.keyring import Keyring
    from reducer.server import Server
    from worker_client.client.rendezvous import Rendezvous

SECRET_BYTES = 32  # as many as the proofs' hash has

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

    They admit the ranks of this group alone, to which its store gives a secret of the job.

    Args:
        group: the job's members.
        interface: where this rank's listens, as of `choose`; empty for the way to the other ranks.
        encrypt: have keys as well, made here, where other machines can reach a reducer.

    Raises:
        ConfigError: a setting of the reducer is wrong, or there is no such interface.
    """
    # The one place where a worker runs a reducer's code; most workers never load it.
    from reducer.server import Server  # noqa: PLC0415
    from reducer.units import is_loopback  # noqa: PLC0415

    several_hosts = len(set(group.gather("host", host_identity()))) > 1
    settings = _settings(interface, several_hosts=several_hosts)
    if group.rank == 0:
        group.share("secret", secrets.token_hex(SECRET_BYTES))
    secret = bytes.fromhex(group.read("secret", 0))
    mine = make_pair()
    others = group.gather("key", mine.public)
    pair = make_pair() if encrypt and not is_loopback(settings.bind) else None
    server = Server(settings, None if pair is None else _keyring(pair, others), secret)
    server.start()
    close_in_child(server, _descriptors)
    try:
        told = json.dumps([server.address, list(server.lanes), pair and pair.public])
        offers = [json.loads(offer) for offer in group.gather("reducer", told)]
        if group.rank == 0:
            group.withdraw("secret")  # who offers a reducer has read it
    except BaseException:
        server.stop()
        raise
    log.info(
        "embedded: each of %d ranks hosts a reducer%s",
        len(offers),
        " and encrypts" * (pair is not None),
    )
    curves = {
        address: None if public is None else Curve(public, mine.secret)
        for _, threads, public in offers
        for address in threads
    }
    return Hosted(server, tuple(address for address, _, _ in offers), curves, secret)


def _descriptors(server: Server) -> Iterator[int]:
    """Yield those of what a reducer's threads listen at, and of what they have accepted there."""
    ports = {int(address.rpartition(":")[2]) for address in server.lanes}
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


def _settings(interface: str, *, several_hosts: bool) -> ReducerConfig:
    from reducer import config as reducer_config  # noqa: PLC0415

    bind = None
    if interface:
        bind = f"tcp://{_chosen_address(interface, several_hosts)}:0"
    elif not config.bind_is_set():
        bind = f"tcp://{_own_address(several_hosts)}:0"
    return reducer_config.load(bind=bind, insecure=True)  # it takes no strangers, without keys too


def _keyring(pair: KeyPair, public: list[str]) -> Keyring:
    """Return keys of a reducer that admits whoever has one of these, to any job."""
    from reducer.engine.allow_list import ANY, AllowList  # noqa: PLC0415
    from reducer.runtime.keyring import Keyring  # noqa: PLC0415

    return Keyring(pair, AllowList({key: frozenset({ANY}) for key in public}))


def _chosen_address(interface: str, several_hosts: bool) -> str:
    """Return an address that the setting means, an IPv6 one in brackets."""
    address = ipaddress.ip_address(choose(interface, addresses()))
    if several_hosts and address.is_loopback:
        raise ConfigError(
            f"REDUCTION_INTERFACE: other hosts cannot reach {address}, and this job has ranks on "
            "several: name an interface that they share"
        )
    return f"[{address}]" if address.version == 6 else str(address)


def _own_address(several_hosts: bool) -> str:
    """Return the address by which other ranks reach this host."""
    if not several_hosts:
        return "127.0.0.1"
    master = config.launch().master_addr or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing; the kernel picks the route's own address
        return str(probe.getsockname()[0])
