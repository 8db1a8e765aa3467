"""The pool that needs no pool: every rank hosts a reducer thread for its share of each buffer."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

from reducer.errors import ConfigError
from worker_client import config
from worker_client.nodes import host_identity

if TYPE_CHECKING:
    from reducer.server import Server
    from worker_client.process_group import ProcessGroup

log = logging.getLogger(__name__)


def start(group: ProcessGroup) -> tuple[Server, tuple[str, ...]]:
    """Start this rank's reducer and learn where those of the others are.

    Returns:
        The reducer, and the addresses of all, in rank order.

    Raises:
        ConfigError: the ranks are on several hosts, and nobody said that the network is private.
    """
    # The one place where a worker runs a reducer's code; most workers never load it.
    from reducer import config as reducer_config  # noqa: PLC0415
    from reducer.server import Server  # noqa: PLC0415

    several_hosts = len(set(group.gather("host", host_identity()))) > 1
    bind = None if config.bind_is_set() else f"tcp://{_own_address(several_hosts)}:0"
    try:
        settings = reducer_config.load(bind=bind)
    except ConfigError as error:
        hint = " (here the switch is REDUCTION_INSECURE=1)" if "--insecure" in str(error) else ""
        raise ConfigError(f"the reducer that this rank hosts cannot start: {error}{hint}") from None
    server = Server(settings)
    server.start()
    try:
        addresses = tuple(group.gather("reducer", server.address))
    except BaseException:
        server.stop()
        raise
    log.info("embedded: each of %d ranks hosts a reducer", len(addresses))
    return server, addresses


def _own_address(several_hosts: bool) -> str:
    """Return the address by which other ranks reach this host."""
    if not several_hosts:
        return "127.0.0.1"
    master = config.launch().master_addr or "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))  # sends nothing; the kernel picks the route's own address
        return str(probe.getsockname()[0])
