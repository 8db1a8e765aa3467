"""The command ``python -m lab``: run a command in a lab, show the labs, clean up."""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from threading import Thread

from lab import Host, Lab, LabUnavailable, claims, keeper
from lab.network import CONGESTION, PREFIX

ENVIRONMENT = """\
The command finds in its environment:
  LAB_INDEX, LAB_NAME, LAB_ADDRESS   of the host that it runs in
  LAB_HOSTS                          how many hosts there are
  LAB_NAMES, LAB_ADDRESSES           of all of them, separated by commas
  LAB_MBIT                           rate of the links, empty if unshaped
"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.do == "keep":
            return keeper.main(options.request)
        if options.do == "run":
            return _run(options)
        return _show() if options.do == "show" else _clean()
    except LabUnavailable as error:
        print(f"lab: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lab", description=__doc__)
    commands = parser.add_subparsers(dest="do", required=True, metavar="run | show | clean")
    run = commands.add_parser(
        "run",
        help="run a command in every host of a new lab, or in one",
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run.add_argument("--hosts", type=int, default=2, help="how many hosts (2)")
    run.add_argument("--mbit", type=float, help="rate of every link, each way (unshaped)")
    run.add_argument("--round-trip-ms", type=float, default=0.0, help="between two hosts (0)")
    run.add_argument("--loss-percent", type=float, default=0.0, help="of the packets (0)")
    run.add_argument("--congestion", default=CONGESTION, help=f"of the hosts' TCP ({CONGESTION})")
    run.add_argument("--loopback", action="store_true", help="no namespaces, no root")
    run.add_argument("--on", type=int, metavar="INDEX", help="run the command in this host alone")
    run.add_argument("command", nargs="+", help="after --: the program and its arguments")
    commands.add_parser("show", help="list the labs on this machine")
    commands.add_parser("clean", help="remove what labs left whose keeper was killed")
    commands.add_parser("keep").add_argument("request")  # what `Lab` itself starts
    return parser


def _run(options: argparse.Namespace) -> int:
    try:
        lab = (
            Lab.loopback(options.hosts)
            if options.loopback
            else Lab(
                options.hosts,
                options.mbit,
                round_trip_ms=options.round_trip_ms,
                loss_percent=options.loss_percent,
                congestion=options.congestion,
            )
        )
    except ValueError as error:
        raise LabUnavailable(str(error)) from error
    if options.on is not None and options.on not in range(options.hosts):
        raise LabUnavailable(f"--on {options.on}: the hosts are 0 to {options.hosts - 1}")
    with lab:
        try:
            if options.on is not None:
                codes = [lab.hosts[options.on].start(options.command, stdin=None).wait()]
            else:
                codes = _on_all(lab.hosts, options.command)
        except FileNotFoundError as error:
            raise LabUnavailable(str(error)) from error
    failed = next((code for code in codes if code), 0)
    return 128 - failed if failed < 0 else failed  # as a shell reports signals


def _on_all(hosts: Sequence[Host], command: Sequence[str]) -> list[int]:
    processes, threads = [], []
    for host in hosts:
        process = host.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        processes.append(process)
        threads.append(Thread(target=_copy, args=(host.index, process), daemon=True))
        threads[-1].start()
    codes = [process.wait() for process in processes]
    for thread in threads:
        thread.join()
    return codes


def _copy(index: int, process: subprocess.Popen[str]) -> None:
    for line in process.stdout or ():
        print(f"[{index}] {line}", end="", flush=True)


def _show() -> int:
    for number in claims.known():
        alive, facts = claims.look(number)
        if not alive:
            print(f"{PREFIX}{number}  dead: remove it with `python -m lab clean`")
            continue
        rate = "unshaped" if facts.mbit is None else f"{facts.mbit:g} Mbit/s"
        rate += f", {facts.round_trip_ms:g} ms" * bool(facts.round_trip_ms)
        print(
            f"{PREFIX}{number}  {facts.hosts} hosts 10.77.{number}.1 to .{facts.hosts}, {rate}, "
            f"of process {facts.owner}: {facts.command}"
        )
    return 0


def _clean() -> int:
    for number in keeper.clean():
        print(f"{PREFIX}{number} removed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
