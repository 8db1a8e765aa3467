"""`reducer status` and `reducer top`: what reducers do, as their HTTP ports tell it, in tables."""

from __future__ import annotations

import itertools
import json as standard_json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from reducer.commands import terminal
from reducer.commands.terminal import FittedTable
from reducer.config import parse_http
from reducer.errors import ConfigError, ReducerLostError, ReductionError, RemoteProtocolError
from reducer.monitoring.status import dump, load
from reducer.wire.messages import printable, worst

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

    from reducer.monitoring.status import JobStatus, ReducerStatus

TIMEOUT_S = 4.0  # for each step of a request
MAX_BYTES = 4 << 20  # of an answer; `reducer.monitoring.status` keeps it far smaller
MAX_ROWS = 40  # of jobs
MAX_QUOTED = 200  # characters of another answer
PIPE_WIDTH = 200  # characters
_AT_ONCE = 16
Ports = Annotated[str, typer.Argument(metavar="HOST:PORT,...", help="HTTP ports of reducers.")]


class Found(NamedTuple):
    """What one reducer said, or why it said nothing."""

    address: str
    status: ReducerStatus | None
    error: ReductionError | None


class Rates(NamedTuple):
    """What a reducer did between two looks, per second."""

    contributions: float
    bytes_in: float
    bytes_out: float


class JobRates(NamedTuple):
    """What a job did at one reducer or at all, per second; `all_reduces` is that of one."""

    bytes_in: float
    bytes_out: float
    all_reduces: float


def status(
    ports: Ports,
    json: Annotated[bool, typer.Option("--json", help="Print all there is, as JSON.")] = False,
) -> None:
    """Show reducers and their jobs once.

    Exit code: 0 if all reducers serve, 1 if one does not or cannot be read, 2 if the command is
    wrong.
    """
    found = read_all(addresses(ports))
    if json:
        typer.echo(standard_json.dumps([_as_json(each) for each in found], indent=2))
    else:
        terminal.console(PIPE_WIDTH).print(render(found))
    if not all(each.status and each.status.state == "serving" for each in found):
        raise typer.Exit(1)


def top(
    ports: Ports,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Looks; 0: until Ctrl-C.")] = 0,
) -> None:
    """Show reducers, with rates, again and again. Ctrl-C ends it.

    Exit code: 0, or 2 if the command is wrong.
    """
    console = terminal.console(PIPE_WIDTH)
    looks = _looks(addresses(ports), interval, count)
    try:
        if not console.is_terminal:  # then one picture follows the other
            for picture in looks:
                console.print(picture)
            return
        with Live(next(looks), console=console, screen=True, auto_refresh=False) as live:
            for picture in looks:
                live.update(picture, refresh=True)
    except KeyboardInterrupt:
        return


def _looks(where: list[str], interval_s: float, count: int) -> Iterator[RenderableType]:
    """Yield what reducers do, `count` times, or for ever if that is 0."""
    before = read_all(where)
    yield render(before, [])
    for _ in range(1, count) if count else itertools.count():
        time.sleep(interval_s)
        after = read_all(where)
        yield render(after, before)
        before = after


def _as_json(each: Found) -> dict[str, object]:
    if each.status is None:
        return {"http": each.address, "error": str(each.error)}
    return {"http": each.address, **standard_json.loads(dump(each.status))}


def addresses(text: str) -> list[str]:
    """Read ``HOST:PORT,HOST:PORT``.

    Raises:
        ConfigError: an address is none, or there is none.
    """
    words = [word for word in (part.strip() for part in text.split(",")) if word]
    if not words:
        raise ConfigError("name the HTTP ports of reducers: HOST:PORT,HOST:PORT")
    try:
        return [parse_http(word) for word in words]
    except ValueError:
        raise ConfigError(f"write HTTP ports as HOST:PORT,HOST:PORT, got {text!r}") from None


def read_all(ports: Sequence[str]) -> list[Found]:
    """Ask all reducers at once; the answers are in the order of `ports`."""
    with ThreadPoolExecutor(min(_AT_ONCE, len(ports))) as pool:
        return list(pool.map(_find, ports))


def read(port: str) -> ReducerStatus:
    """Ask one reducer.

    Raises:
        ReducerLostError: nobody answers there.
        RemoteProtocolError: what answers is no reducer's HTTP port.
    """
    code, body = _get(port, "/status.json")
    if code != 200:
        said = body.partition(b"\n")[0].decode(errors="replace")
        raise RemoteProtocolError(
            f"{port} answers /status.json with status {code} and {said[:MAX_QUOTED]!r}: is it the "
            "HTTP port of a reducer?"
        )
    try:
        return load(body)
    except RemoteProtocolError as error:
        raise RemoteProtocolError(f"{port} answers with {error}") from None


def unhealthy(port: str | None) -> str:
    """Say what is wrong with a reducer, as its ``/healthz`` tells; nothing if all is well.

    Raises:
        ReducerLostError: nobody answers there.
        RemoteProtocolError: what answers does not speak HTTP.
    """
    if port is None:
        return "without an HTTP port nobody can ask the reducer: set REDUCTION_HTTP, or pass --http"
    code, body = _get(port, "/healthz")
    said = body.partition(b"\n")[0].decode(errors="replace")
    return "" if code == 200 else f"{port} answers: {printable(said[:MAX_QUOTED])}"


def _get(port: str, path: str) -> tuple[int, bytes]:
    host, _, number = port.rpartition(":")
    # Not urllib: that would send it through the proxies that the environment names.
    with closing(HTTPConnection(host.strip("[]"), int(number), timeout=TIMEOUT_S)) as connection:
        try:
            connection.connect()
        except OSError as error:
            why = f"{port} cannot be reached: {str(error) or type(error).__name__}"
            if isinstance(error, socket.gaierror):
                why = f"{host} could not be resolved ({error.strerror}): check name and name server"
            elif isinstance(error, ConnectionRefusedError):
                why = f"nothing listens at {port}: is the reducer running, and with --http {port}?"
            raise ReducerLostError(why, reducer=port) from None
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read(MAX_BYTES + 1)
        except (HTTPException, OSError):
            # What libzmq says to a stranger is not HTTP, and may be nothing at all.
            raise RemoteProtocolError(
                f"{port} took the connection, but does not answer HTTP: name the port of --http, "
                "not the one that workers use"
            ) from None
    if len(body) > MAX_BYTES:
        raise RemoteProtocolError(f"{port} answers with more than {MAX_BYTES} bytes: no reducer")
    return response.status, body


def _find(port: str) -> Found:
    try:
        return Found(port, read(port), None)
    except ReductionError as error:
        return Found(port, None, error)


def render(found: Sequence[Found], earlier: Sequence[Found] | None = None) -> RenderableType:
    """Return the tables of reducers and of jobs, and what is wrong.

    Args:
        found: what the reducers said.
        earlier: what they said before, or nothing; then rates are shown in place of totals, and
            those of jobs are of the time since.
    """
    rates = None if earlier is None else rates_between(earlier, found)
    parts: list[RenderableType] = [reducers(found, rates)]
    known = [each.status for each in found if each.status]
    if any(status.jobs for status in known):
        parts.append(jobs(found, earlier or ()))
        parts += [Text(_plain(line), style="yellow") for line in stragglers(known)]
    parts += [Text(_plain(str(each.error)), style="red") for each in found if each.error]
    return Group(*parts)


def reducers(found: Sequence[Found], rates: dict[str, Rates] | None) -> FittedTable:
    """Return one row for each reducer."""
    per = "" if rates is None else "/s"
    columns: dict[str, Callable[[ReducerStatus, Rates], str]] = {
        "state": lambda status, _: status.state,
        "up": lambda status, _: duration(status.uptime_s),
        "jobs": lambda status, _: str(status.jobs_total),
        "ranks": lambda status, _: str(max((lane.members for lane in status.lanes), default=0)),
        f"in{per}": lambda _, done: size(done.bytes_in),
        f"out{per}": lambda _, done: size(done.bytes_out),
        "reserved": lambda status, _: _share(status.memory.reserved, status.memory.limit),
        f"contributions{per}": lambda _, done: f"{done.contributions:,.0f}",
        "refused": lambda status, _: str(status.counters.get("refused", 0)),
        "failed": lambda status, _: str(status.counters.get("rounds_failed", 0)),
        "version": lambda status, _: status.version,
    }
    rows = []
    for address, status, _ in found:
        row = ["unreachable", *["-"] * (len(columns) - 1)]
        if status is not None:
            totals = Rates(*(status.counters.get(name, 0) for name in Rates._fields))
            done = totals if rates is None else rates.get(address, Rates(0, 0, 0))
            row = [cell(status, done) for cell in columns.values()]
        rows.append([*map(_cell, [address, *row])])
    return FittedTable("Reducers", ("HTTP port", *columns), rows, texts=2)


def jobs(found: Sequence[Found], earlier: Sequence[Found]) -> FittedTable:
    """Return one row for each generation of each job, over all reducers that have it."""
    before = {each.address: each.status for each in earlier}
    groups: dict[tuple[str, int], list[tuple[JobStatus, JobRates | None]]] = {}
    statuses = [each.status for each in found if each.status]
    for address, status, _ in found:
        if status is None:
            continue
        for job in status.jobs:
            rates = _job_rates(job, status, before.get(address))
            groups.setdefault((job.name, job.generation), []).append((job, rates))
    ordered = sorted(groups.values(), key=lambda group: -sum(job.reserved for job, _ in group))
    rows = [_job(group, len(statuses)) for group in ordered[:MAX_ROWS]]
    if all(row["generation"] == "0" for row in rows):
        rows = [{name: cell for name, cell in row.items() if name != "generation"} for row in rows]
    further = len(ordered) > MAX_ROWS or any(
        status.jobs_total > len(status.jobs) for status in statuses
    )
    return FittedTable(
        "Jobs",
        [*rows[0]],
        [[*map(_cell, row.values())] for row in rows],
        texts=1,
        caption="and further jobs, with less memory" * further,
    )


def stragglers(statuses: Sequence[ReducerStatus]) -> list[str]:
    """Say which rank of each job the others wait for, as most of its reducers see it."""
    found: dict[str, list[JobStatus]] = {}
    for job in (job for status in statuses for job in status.jobs):
        if job.straggler is not None:
            found.setdefault(job.name, []).append(job)
    lines = []
    for name, told in sorted(found.items())[:MAX_ROWS]:
        its = worst(job.straggler for job in told)
        host = its and next(filter(None, (job.host_of(its.rank) for job in told)), "")
        lines.append(f"job {name}: {its}{host and f' (on {host})'}")
    return lines


def rates_between(before: Sequence[Found], after: Sequence[Found]) -> dict[str, Rates]:
    """Return what each reducer did between two looks; nothing of one that was restarted."""
    earlier = {each.address: each.status for each in before if each.status}
    found: dict[str, Rates] = {}
    for each in after:
        now, then = each.status, earlier.get(each.address)
        if now is None or then is None or now.incarnation != then.incarnation:
            continue
        seconds = now.uptime_s - then.uptime_s
        if seconds > 0:
            found[each.address] = Rates(
                *(_rate(now, then, name, seconds) for name in Rates._fields)
            )
    return found


def _job_rates(
    job: JobStatus, status: ReducerStatus, before: ReducerStatus | None
) -> JobRates | None:
    """Return what a job did since a look before, else lately; None if neither is known."""
    key = job.name, job.generation
    was = None
    if before and before.incarnation == status.incarnation:
        was = next((one for one in before.jobs if (one.name, one.generation) == key), None)
    if was is not None and before and status.uptime_s > before.uptime_s:
        seconds = status.uptime_s - before.uptime_s
        ends = zip(_moved(job), _moved(was), strict=True)
        return JobRates(*(max(0, now - then) / seconds for now, then in ends))
    if job.lately is None or job.lately.seconds <= 0:
        return None
    done = job.lately.bytes_in, job.lately.bytes_out, job.lately.all_reduces
    return JobRates(*(each / job.lately.seconds for each in done))


def _moved(job: JobStatus) -> tuple[int, int, int]:
    return job.traffic.bytes_in, job.traffic.bytes_out, job.traffic.all_reduces


def duration(seconds: float) -> str:
    """Return a duration in whole units, as the page does."""
    minutes = int(seconds) // 60
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 60 // 24} days"


def _time(seconds: float) -> str:
    """Return a time in two digits; - if there is none."""
    if seconds <= 0:
        return "-"
    for unit, factor in (("us", 1e6), ("ms", 1e3)):
        if seconds * factor < 995:
            return f"{float(f'{seconds * factor:.2g}'):g} {unit}"
    return f"{float(f'{seconds:.2g}'):g} s"


def size(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}" if nbytes < 999.5 else f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def _rate(now: ReducerStatus, then: ReducerStatus, name: str, seconds: float) -> float:
    return (now.counters.get(name, 0) - then.counters.get(name, 0)) / seconds


def _share(nbytes: int, limit: int) -> str:
    return f"{size(nbytes)}, {nbytes / max(1, limit):.0%}"


def _job(known: Sequence[tuple[JobStatus, JobRates | None]], reducers: int) -> dict[str, str]:
    """Return what reducers say of one job, by the names of the columns."""
    group = [job for job, _ in known]
    first = min(group, key=lambda job: job.present)
    rates = [its for _, its in known if its is not None]
    lately = [job.lately for job in group if job.lately is not None]
    late = worst(job.straggler for job in group)
    return {
        "job": first.name,
        "ranks": f"{first.present} of {first.world_size}",
        "in/s": size(sum(its.bytes_in for its in rates)) if rates else "-",
        "out/s": size(sum(its.bytes_out for its in rates)) if rates else "-",
        "all-reduce": _time(max((its.median_s for its in lately), default=0)),
        "p99": _time(max((its.p99_s for its in lately), default=0)),
        "straggler": f"{late.rank} {late.cause} {late.share:.0%}" if late else "none",
        "all-reduces/s": f"{max(its.all_reduces for its in rates):,.1f}" if rates else "-",
        "absent": first.ranks_absent or "none",
        "held": size(sum(job.held for job in group)),
        "reserved": size(sum(job.reserved for job in group)),
        "rounds": str(max(job.rounds for job in group)),
        "generation": str(first.generation),
        "reducers": f"{len(group)} of {reducers}",
    }


def _cell(text: str) -> Text:
    return Text(_plain(text))


def _plain(text: str) -> str:
    """Whatever was read, let it do nothing to the terminal."""
    return "\n".join(map(printable, text.split("\n")))
