"""Fuzz one target or all: ``python -m fuzz engine --seconds 60``; ``--replay FILE`` for one input.

With ``--mutations`` break the code on purpose in a copy of the tree, and say which input notices.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from fuzz import drivers, mutations
from fuzz.targets import TARGETS


def main() -> int:
    """Do what the command line asks for; 1 if a promise was broken, or a mutation has survived."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", default="all", choices=[*TARGETS, "all"])
    parser.add_argument("--runs", type=int, default=0, help="inputs per target")
    parser.add_argument("--seconds", type=int, default=0, help="time per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--blind", action="store_true", help="without atheris; under sanitizers")
    parser.add_argument("--trace", action="store_true", help="with --blind: say every input")
    parser.add_argument("--replay", type=Path, help="one input alone, with its traceback")
    parser.add_argument("--mutations", action="store_true")
    arguments = parser.parse_args()
    if arguments.mutations:
        return mutations.main(arguments.runs or 20_000, arguments.seed)
    if arguments.target == "all":
        return _each(sys.argv[1:])
    if arguments.replay:
        TARGETS[arguments.target].load()(arguments.replay.read_bytes())
        return 0
    if not arguments.runs and not arguments.seconds:
        parser.error("say how long: --runs N or --seconds N")
    limits = arguments.runs, arguments.seconds, arguments.seed
    if arguments.blind:
        drivers.blind(arguments.target, *limits, trace=arguments.trace)
        return 0
    try:
        drivers.guided(arguments.target, *limits)
    except ImportError as error:
        print(f"{error}: run `make fuzz`, install the extra `fuzz`, or give --blind")
        return 1


def _each(options: list[str]) -> int:
    """Fuzz every target in a process of its own, as libFuzzer ends the process it is in."""
    options = [option for option in options if option != "all"]
    commands = {name: [sys.executable, "-m", "fuzz", name, *options] for name in TARGETS}
    codes = {name: subprocess.call(command) for name, command in commands.items()}
    failed = [name for name, code in codes.items() if code]
    print(f"failed: {', '.join(failed) or 'nothing'}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
