"""`worker-client nccl`: what to set so that NCCL uses reducers, and what it will do here."""

from __future__ import annotations

import ctypes
import ctypes.util
import shlex
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import typer

from reducer.commands import terminal
from reducer.errors import ConfigError
from worker_client import config
from worker_client.client.interfaces import addresses, choose, described
from worker_client.nccl.bridge import check_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from worker_client.config import WorkerConfig

LIBRARY = Path(__file__).parents[1] / "nccl" / "libnccl-net-reduction.so"
MOST_GPUS = 8  # of a node, for NCCL's collective network
_SO = "libnccl.so.2"
# The first NCCL that asks for each version of a plug-in's tables; all ask for older ones as well.
_TABLES = {12: (2, 30), 11: (2, 28), 10: (2, 26), 9: (2, 24), 8: (2, 20)}
_ALGO_BY_FUNCTION = (2, 24)  # the first NCCL whose NCCL_ALGO may name a function
_GPUS, _SWITCHES = Path("/proc/driver/nvidia/gpus"), Path("/proc/driver/nvidia-nvswitch/devices")


class NcclCondition(NamedTuple):
    """One thing that matters to NCCL's use of reducers.

    Attributes:
        text: a sentence.
        prevents: NCCL cannot use reducers because of it.
    """

    text: str
    prevents: bool = False


def nccl(*, check: bool) -> int:
    """Print exports for a shell, or with `check` what NCCL will do; return the exit code.

    Raises:
        ConfigError: the plug-in was not built, or a setting is wrong.
    """
    if not check:
        for name, value in exports(nccl_version()).items():
            typer.echo(f"export {name}={shlex.quote(value)}")
        return 0
    found = list(findings(config.load()))
    for one in found:
        typer.echo(terminal.wrapped(f"{'no ' if one.prevents else 'ok '} {one.text}", 4))
    prevented = any(one.prevents for one in found)
    last = (
        "NCCL cannot send all-reduces through reducers here"
        if prevented
        else "NCCL will send all-reduces between nodes through reducers"
    )
    typer.echo(last)
    return int(prevented)


def exports(version: tuple[int, int] | None) -> dict[str, str]:
    """Return variables that have NCCL, of this version if it is known, use reducers.

    Raises:
        ConfigError: the plug-in was not built.
    """
    if not LIBRARY.is_file():
        raise ConfigError(
            f"the plug-in for NCCL was not built: there is no {LIBRARY}. Install a wheel, or the "
            "package again where there is a C compiler"
        )
    variables = {"NCCL_NET_PLUGIN": str(LIBRARY), "NCCL_COLLNET_ENABLE": "1"}
    if version is None or version >= _ALGO_BY_FUNCTION:
        # NCCL adds up inside a node along a chain, or where there is an NVSwitch directly.
        direct = "collnetdirect," * (_count(_SWITCHES) > 0)
        variables["NCCL_ALGO"] = f"allreduce:{direct}collnetchain"
    if (libpython := _libpython()) is not None:
        variables["REDUCTION_LIBPYTHON"] = str(libpython)
    return variables


def findings(settings: WorkerConfig) -> Iterator[NcclCondition]:
    """Say what was found, one after another."""
    yield _plugin(nccl_version())
    try:
        check_settings(settings)
        where = f"a pool of {len(settings.servers)}" if settings.servers else "one in every rank"
        yield NcclCondition(f"reducers: {where}.")
    except ConfigError as error:
        yield NcclCondition(f"settings: {error}.", prevents=True)
    gpus = _count(_GPUS)
    too_many = f" NCCL's collective network takes {MOST_GPUS} a node at most." * (gpus > MOST_GPUS)
    text = f"GPUs of this machine, as the driver says: {gpus}.{too_many}"
    yield NcclCondition(text, prevents=not 0 < gpus <= MOST_GPUS)
    yield _nodes()
    yield _interface(settings)


def _plugin(version: tuple[int, int] | None) -> NcclCondition:
    """Say which of the plug-in's tables NCCL will take."""
    if not LIBRARY.is_file():
        return NcclCondition(f"the plug-in was not built: there is no {LIBRARY}.", prevents=True)
    if version is None:
        text = f"there is no NCCL: neither torch's ({_SO} of nvidia-nccl) nor the system's."
        return NcclCondition(text, prevents=True)
    library = ctypes.CDLL(str(LIBRARY))
    spoken = f"NCCL {version[0]}.{version[1]}"
    for table, first in _TABLES.items():
        if version >= first and hasattr(library, f"ncclCollNetPlugin_v{table}"):
            return NcclCondition(f"{spoken} takes version {table} of the plug-in's tables.")
    return NcclCondition(
        f"{spoken} is too old: the plug-in needs NCCL 2.20 or later.", prevents=True
    )


def _nodes() -> NcclCondition:
    told = config.launch()
    if not told.world_size or not told.local_world_size:
        text = "nodes: the launcher does not say how many. NCCL uses reducers from two on."
        return NcclCondition(text)
    nodes = told.world_size // told.local_world_size
    text = f"nodes, as the launcher says: {nodes}."
    if nodes < 2:
        return NcclCondition(f"{text} NCCL uses reducers from two on.", prevents=True)
    return NcclCondition(text)


def _interface(settings: WorkerConfig) -> NcclCondition:
    here = addresses()
    theirs = config.environment().get("NCCL_SOCKET_IFNAME", "")
    if settings.interface:
        try:
            return NcclCondition(
                f"interface: {choose(settings.interface, here)} (REDUCTION_INTERFACE)."
            )
        except ConfigError as error:
            return NcclCondition(f"{error}.", prevents=True)
    if theirs:
        return NcclCondition(
            f"interface: of NCCL_SOCKET_IFNAME={theirs}; there are {described(here)}."
        )
    return NcclCondition(f"interface: NCCL's choice; there are {described(here)}.")


def nccl_version() -> tuple[int, int] | None:
    """Return the version of the NCCL that a program here would use: torch's, or the system's."""
    spec = find_spec("nvidia") and find_spec("nvidia.nccl")
    homes = [] if spec is None else list(spec.submodule_search_locations or ())
    candidates = [str(Path(home) / "lib" / _SO) for home in homes]
    for name in [*candidates, ctypes.util.find_library("nccl") or _SO]:
        number = ctypes.c_int()
        try:
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(number))
        except OSError:
            continue  # it is not there
        return number.value // 10_000, number.value // 100 % 100
    return None


def _libpython() -> Path | None:
    """Return this Python's shared library, for programs that have none; None if it has none."""
    folder, name = sysconfig.get_config_vars("LIBDIR", "INSTSONAME")
    found = Path(str(folder)) / str(name)
    return found if ".so" in found.name and found.is_file() else None


def _count(folder: Path) -> int:
    return len(list(folder.iterdir())) if folder.is_dir() else 0
