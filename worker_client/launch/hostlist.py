"""SLURM's lists of hosts and of tasks: ``gpu[01-03,7],login`` and ``2(x3),1``."""

from __future__ import annotations

import itertools
import re

from worker_client.launch.findings import refuse

MOST_HOSTS = 1 << 16  # as SLURM itself

_PART = re.compile(r"\[(?P<ranges>[^\[\]]*)\]|(?P<text>[^\[\],\s]+)")
_RANGE = re.compile(r"(?P<first>[0-9]{1,9})(-(?P<last>[0-9]{1,9}))?")
_TASKS = re.compile(r"(?P<tasks>[0-9]{1,9})(\(x(?P<times>[0-9]{1,9})\))?")


def hosts(name: str, text: str) -> list[str]:
    """Return the hosts of a list, in its order.

    Several brackets in one word are all combined, the last one fastest.

    Raises:
        ConfigError: it is no such list; the message quotes the offending part.
    """
    found: list[str] = []
    for word in _words(name, text):
        if "[" in word and not word.endswith("]"):  # SLURM has no such names
            refuse(name, "nothing follows the last bracket", word)
        parts: list[list[str]] = []
        at = 0
        while at < len(word):
            match = _PART.match(word, at)
            if match is None:
                refuse(name, "write hosts such as node[01-04,7],other", word)
            ranges = match["ranges"]
            parts.append([match["text"]] if ranges is None else _numbers(name, ranges, word))
            at = match.end()
        combined = itertools.product(*parts)
        found += map("".join, itertools.islice(combined, MOST_HOSTS + 1))
        if len(found) > MOST_HOSTS:
            refuse(name, f"at most {MOST_HOSTS} hosts", word)
    return found


def tasks(name: str, text: str) -> list[int]:
    """Return the number of tasks on each node, by node."""
    counts: list[int] = []
    for part in text.split(","):
        match = _TASKS.fullmatch(part.strip())
        if match is None:
            refuse(name, "write numbers of tasks such as 2(x3),1", part)
        times = int(match["times"] or 1)
        if len(counts) + times > MOST_HOSTS:
            refuse(name, f"at most {MOST_HOSTS} nodes", part)
        counts += [int(match["tasks"])] * times
    return counts


def _words(name: str, text: str) -> list[str]:
    """Split at the commas that are outside of brackets."""
    words = re.findall(r"(?:\[[^\[\]]*\]|[^\[\],])+", text)
    if not words or ",".join(words) != text:
        refuse(name, "write hosts such as node[01-04,7],other", text)
    return [word.strip() for word in words]


def _numbers(name: str, ranges: str, word: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            refuse(name, f"write a number or a range in the brackets of {word}", part)
        first, last = match["first"], match["last"] or match["first"]
        if int(last) < int(first) or int(last) - int(first) >= MOST_HOSTS:
            refuse(name, f"a range of {word} ends before it begins, or is too long", part)
        # Leading zeros are kept: the first number's width counts.
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found
