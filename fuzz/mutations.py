"""Bugs that are planted on purpose in copies of the tree: a fuzzer must find each.

Each copy is built with the sanitizers, so that what is wrong in C shows as well as in Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from fuzz import sanitizers
from fuzz.targets import TARGETS

COPIES = Path("build/mutations")
SOUND = COPIES / "none"  # built once; each copy of it builds what its bug changes
_NUMBER = re.compile(r"^input (\d+)", re.MULTILINE)
_SHOWS = re.compile(
    r"^(?:SUMMARY: .*|[\w.]*Error: .*|\S*:\d+:\d+: runtime error: .*)$", re.MULTILINE
)


class Mutation(NamedTuple):
    """One bug, which target is to find it, and what is replaced where; each text is there once."""

    what: str
    target: str
    edits: list[tuple[str, str, str]]


_WHOLE_FRAME = "frame->nbytes > most ? fail(zmtp, ZMTP_TOO_LARGE) : ZMTP_FRAME;"
_ANY_FRAME = "most > 0 ? ZMTP_FRAME : fail(zmtp, ZMTP_TOO_LARGE);"
_REMOVE = "map_remove(&round->slots, slot->offset);"
_LENGTH_CHECK_IN_C = ("reducer/wire/header.h", "payload != h->nbytes || ", "")
MUTATIONS = {
    "no-length-check": Mutation(
        "a payload may be shorter or longer than its header says",
        "engine",
        [("reducer/wire/header.py", "payload_bytes != header.nbytes", "False"), _LENGTH_CHECK_IN_C],
    ),
    "no-length-check-in-c": Mutation(
        "the same in the compiled loop alone, which sums beyond the end of the payload",
        "engine",
        [_LENGTH_CHECK_IN_C],
    ),
    "no-rank-check": Mutation(
        "a rank may be beyond the world, and so beyond the end of every table of ranks",
        "engine",
        [("reducer/engine/membership.py", "header.rank >= hello.world_size", "False")],
    ),
    "slot-freed-early": Mutation(
        "a slot is freed before it is taken out of its round",
        "engine",
        [
            ("reducer/engine/slots.c", _REMOVE, f"free(slot);\n    {_REMOVE}"),
            ("reducer/engine/slots.c", "rounds->done--;\n    free(slot);", "rounds->done--;"),
        ],
    ),
    "stream-outlives-its-link": Mutation(
        "a further stream is remembered as one when its member has left",
        "engine",
        [("reducer/engine/membership.py", "del self._by_peer[peer]", "pass")],
    ),
    "first-connection-goes-on": Mutation(
        "whichever connection a RESUME is for, the link's first one goes on",
        "engine",
        [("reducer/engine/engine.py", "resumed(said,", "resumed(said._replace(number=0),")],
    ),
    "window-not-set-aside": Mutation(
        "a window is granted that nothing is set aside for",
        "engine",
        [
            (
                "reducer/engine/quotas.py",
                "job.rounds.reserved = _needed(job, job.window)",
                "pass",
            )
        ],
    ),
    "streams-count-from-0": Mutation(
        "a worker says STREAM with the number of the link's first connection",
        "session",
        [("worker_client/protocol/joining.py", "range(1, streams)", "range(streams - 1)")],
    ),
    "goes-on-unasked": Mutation(
        "connections of a worker go on though its reducer does not speak RESUME",
        "session",
        [("worker_client/protocol/joining.py", "if link.resumes:", "if self._spec.resumes:")],
    ),
    "sealed-twice": Mutation(
        "a sealed frame may come again",
        "zmtp",
        [("reducer/zmtp/curve.c", "if (count <= curve->peer_nonce)", "if (0)")],
    ),
    "no-limit-of-frames": Mutation(
        "a frame may be as long as its sender likes",
        "zmtp",
        [("reducer/zmtp/zmtp.c", _WHOLE_FRAME, _ANY_FRAME)],
    ),
    "no-limit-of-contexts": Mutation(
        "a PING is answered beyond the end of the answer",
        "zmtp",
        [("reducer/zmtp/zmtp.c", " || nbytes - before > CONTEXT_BYTES)", ")")],
    ),
    "round-freed-under-its-view": Mutation(
        "a round is forgotten while the engine still holds a view of it",
        "engine",
        [("reducer/engine/_slots.pyx", "if sequence in self._views:", "if False:")],
    ),
}


def main(runs: int, seed: int) -> int:
    """Plant each bug and look for it with so many blind inputs; 1 if one is not found."""
    survived = 0
    sanitizers.copy(SOUND)
    sanitizers.build(SOUND)
    for name, mutation in MUTATIONS.items():
        tree = COPIES / name
        plant(mutation, tree)
        sanitizers.build(tree)
        inputs, how = look(mutation, tree, runs, seed)
        survived += inputs is None
        found = f"not found within {runs} inputs" if inputs is None else f"found by input {inputs}"
        print(f"{name} ({mutation.what}): {found}{how and ': ' + how}", flush=True)
        shutil.rmtree(tree)
    return int(bool(survived))


def plant(mutation: Mutation, tree: Path) -> None:
    """Copy the sound tree and put a bug into the copy.

    Raises:
        ValueError: the code has changed, and the mutation with it must.
    """
    shutil.rmtree(tree, ignore_errors=True)
    shutil.copytree(SOUND, tree)
    for file, sound, broken in mutation.edits:
        text = (tree / file).read_text()
        if text.count(sound) != 1:
            raise ValueError(f"{file} has {sound!r} {text.count(sound)} times: write it anew")
        (tree / file).write_text(text.replace(sound, broken))


def look(mutation: Mutation, tree: Path, runs: int, seed: int) -> tuple[int | None, str]:
    """Fuzz a copy under the sanitizers; return which input has found the bug, and how it shows."""
    assert mutation.target in TARGETS
    command = [sys.executable, "-m", "fuzz", mutation.target, "--blind", "--trace"]
    command += ["--runs", str(runs), "--seed", str(seed)]
    done = subprocess.run(
        command,
        cwd=tree,
        env=os.environ | sanitizers.environment(tree),
        check=False,
        capture_output=True,
        text=True,
    )
    if done.returncode == 0:
        return None, ""
    told = done.stdout + done.stderr
    shows = _SHOWS.findall(told)
    return int(_NUMBER.findall(done.stdout)[-1]), shows[0][:200] if shows else told[-200:]
