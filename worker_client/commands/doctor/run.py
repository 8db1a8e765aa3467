"""The command: examines everything, and says it to people or to programs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path  # noqa: TC003 (an argument's type)
from typing import TYPE_CHECKING, Any

import typer

from reducer.errors import ConfigError
from worker_client import config
from worker_client.client import bootstrap
from worker_client.commands.doctor import said
from worker_client.commands.doctor.dumps import examine_dumps
from worker_client.commands.doctor.examine import examine
from worker_client.commands.doctor.findings import Health, Problem, compare
from worker_client.commands.doctor.host import examine_host
from worker_client.commands.launch import found_out
from worker_client.runtime.credentials import load as load_keys
from worker_client.runtime.zmtp_greeting import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from worker_client.launch import Resolved

PATIENCE_S = 5.0  # for a reducer that has answered the greeting to answer a HELLO


def doctor_dumps(directory: Path, *, as_json: bool) -> int:
    """Print what the files of ranks' latest calls say.

    Args:
        directory: where they are, of one job or several.
        as_json: print one JSON object instead.

    Returns:
        The exit code: 0, or 1 if anything is wrong.

    Raises:
        ConfigError: there are no such files, or one of them cannot be read.
    """
    findings = examine_dumps(directory)
    if as_json:
        typer.echo(json.dumps({"findings": [one._asdict() for one in findings]}, indent=2))
    else:
        said.findings(findings)
    return 1 if findings else 0


def doctor(*, as_json: bool) -> int:
    """Print what was detected and what was found, and what to do about it.

    Args:
        as_json: print one JSON object instead.

    Returns:
        The exit code: 0, or 1 if anything is wrong.
    """
    try:
        resolved = config.launch()
        settings = config.load()
        load_keys(settings.keys)  # what is wrong with them is wrong at every reducer
    except ConfigError as error:
        _print_mistake(str(error), as_json=as_json)
        return 1
    told = bool(config.environment().get("GLOO_SOCKET_IFNAME"))
    reducers = [split(address)[0] for address in settings.servers]
    host = list(examine_host(resolved, reducers, told=told))
    if not as_json:
        said.detected(found_out(resolved))
        said.host(host)
    connect = partial(bootstrap.connect_alone, connect_timeout=PATIENCE_S)
    found = compare([examine(address, connect, settings.servers) for address in settings.servers])
    if as_json:
        typer.echo(json.dumps(_facts(resolved, host, found), indent=2))
    else:
        said.reducers(found)
    ill = any(problem.certain for problem in host) or any(one.problem for one in found)
    return 1 if ill else 0


def _print_mistake(message: str, *, as_json: bool) -> None:
    if as_json:
        problem = {"address": None, "kind": "settings", "message": message, "advice": "correct it"}
        typer.echo(json.dumps({"detected": None, "reducers": [], "problems": [problem]}, indent=2))
    else:
        said.mistake(message)


def _facts(resolved: Resolved, host: Sequence[Problem], found: Sequence[Health]) -> dict[str, Any]:
    detected = {
        field: {"value": value, "because": because}
        for field, value, because in resolved.described()
    }
    reducers = [
        {
            "address": one.address,
            "resolved": one.resolved,
            "lanes": one.lanes,
            "round_trip_s": one.round_trip_s,
            "bytes_per_s": one.bytes_per_s,
        }
        for one in found
    ]
    ill: list[tuple[str | None, Problem]]
    ill = [(None, problem) for problem in host if problem.certain]
    ill += [(one.address, one.problem) for one in found if one.problem]
    problems = [
        {
            "address": address,
            "kind": problem.kind.value,
            "message": problem.message,
            "advice": problem.advice,
        }
        for address, problem in ill
    ]
    return {"detected": detected, "reducers": reducers, "problems": problems}
