"""Statuses of reducers as tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from reducer.monitoring.status import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from reducer.commands.status_client import Found
    from reducer.monitoring.status import JobStatus, ReducerStatus

MAX_ROWS = 40  # of jobs


class Rates(NamedTuple):
    """What a reducer did between two looks, per second."""

    contributions: float
    bytes_in: float
    bytes_out: float


def render(found: Sequence[Found], rates: dict[str, Rates] | None = None) -> RenderableType:
    """Return the tables of reducers and of jobs, and what is wrong.

    Args:
        found: what the reducers said.
        rates: by address; with them rates are shown in place of totals.
    """
    parts: list[RenderableType] = [reducers(found, rates)]
    known = [each.status for each in found if each.status]
    if any(status.jobs for status in known):
        parts.append(jobs(known))
    parts += [Text(_plain(str(each.error)), style="red") for each in found if each.error]
    return Group(*parts)


def reducers(found: Sequence[Found], rates: dict[str, Rates] | None) -> Table:
    """Return one row for each reducer."""
    per = "" if rates is None else "/s"
    table = _table("Reducers", "HTTP port", "state")
    numbers = ("jobs", "ranks", "reserved", f"contributions{per}", f"in{per}", f"out{per}")
    for name in (*numbers, "refused", "failed"):
        table.add_column(name, justify="right", overflow="fold")
    for each in found:
        rate = None if rates is None else rates.get(each.address, Rates(0, 0, 0))
        table.add_row(*map(_cell, _reducer(each, rate)))
    return table


def jobs(statuses: Sequence[ReducerStatus]) -> Table:
    """Return one row for each generation of each job, over all reducers that have it."""
    table = _table("Jobs", "job")
    for name in ("generation", "reducers", "ranks", "absent", "held", "reserved", "rounds"):
        table.add_column(name, justify="right", overflow="fold")
    groups: dict[tuple[str, int], list[JobStatus]] = {}
    for status in statuses:
        for job in status.jobs:
            groups.setdefault((job.name, job.generation), []).append(job)
    ordered = sorted(groups.values(), key=lambda group: -sum(job.reserved for job in group))
    for group in ordered[:MAX_ROWS]:
        table.add_row(*map(_cell, _job(group, len(statuses))))
    if len(ordered) > MAX_ROWS or any(each.jobs_total > len(each.jobs) for each in statuses):
        table.caption = "and further jobs, with less memory"
    return table


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


def size(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}" if nbytes < 999.5 else f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.4g} TB"


def _rate(now: ReducerStatus, then: ReducerStatus, name: str, seconds: float) -> float:
    return (now.counters.get(name, 0) - then.counters.get(name, 0)) / seconds


def _reducer(each: Found, rate: Rates | None) -> list[str]:
    status = each.status
    if status is None:
        return [each.address, "unreachable", *["-"] * 8]
    count = status.counters.get
    done = (count("contributions", 0), count("bytes_in", 0), count("bytes_out", 0))
    contributions, bytes_in, bytes_out = done if rate is None else rate
    memory = status.memory
    return [
        each.address,
        status.state,
        str(status.jobs_total),
        str(max(lane.members for lane in status.lanes) if status.lanes else 0),
        f"{size(memory.reserved)}, {memory.reserved / max(1, memory.limit):.0%}",
        f"{contributions:,.0f}",
        *map(size, (bytes_in, bytes_out)),
        str(count("refused", 0)),
        str(count("rounds_failed", 0)),
    ]


def _job(group: Sequence[JobStatus], reducers: int) -> list[str]:
    first = min(group, key=lambda job: job.present)
    return [
        first.name,
        str(first.generation),
        f"{len(group)} of {reducers}",
        f"{first.present} of {first.world_size}",
        first.ranks_absent or "none",
        size(sum(job.held for job in group)),
        size(sum(job.reserved for job in group)),
        str(max(job.rounds for job in group)),
    ]


def _table(title: str, *texts: str) -> Table:
    """Return a table with columns of text; what does not fit goes on in the next line."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for name in texts:
        table.add_column(name, overflow="fold")
    return table


def _cell(text: str) -> Text:
    return Text(_plain(text))


def _plain(text: str) -> str:
    """Whatever was read, let it do nothing to the terminal."""
    return "\n".join(part if part.isprintable() else printable(part) for part in text.split("\n"))
