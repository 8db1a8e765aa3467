"""`Lab` and its hosts: what benchmarks and tests use."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, TypeAlias

from lab.claims import Facts
from lab.keeper import Request, clean, tear_down
from lab.network import CONGESTION, LabUnavailable, Network, require_root
from lab.processes import MARK
from worker_client.commands.demo.ranks import free_port

ROOT = Path(__file__).parent.parent
STOP_S = 60.0
IPERF_RUNS = 3
IPERF_FAR_S = 10
IPERF_START_S = 5.0
IPERF_RUN_S = 30.0  # besides the time that is measured
Stream: TypeAlias = "int | IO[str] | IO[bytes] | None"


class Host:
    """One host of a lab.

    Attributes:
        index: its place in `Lab.hosts`.
        name: its namespace, for ``ip netns exec``; every host of the lab resolves it.
        address: its IPv4 address.
    """

    def __init__(self, lab: Lab, index: int, name: str, address: str) -> None:
        self.index = index
        self.name = name
        self.address = address
        self._lab = lab

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        stdout: Stream = None,
        stderr: Stream = None,
        *,
        stdin: Stream = subprocess.DEVNULL,
        cwd: Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start a process in this host, in a session of its own; the end of the lab kills it.

        `env` is added to this process's environment and the ``LAB_`` names; all else is as of
        `subprocess.Popen`. Read pipes before the lab ends.

        Raises:
            FileNotFoundError: there is no such program.
        """
        return self._lab._start(self, argv, env or {}, (stdin, stdout, stderr), cwd)  # noqa: SLF001


class Lab:
    """Some hosts, from enter to exit.

    Needs root, ``ip`` and ``tc``, and with long round trips a C compiler: entering it raises
    `LabUnavailable` where they are missing. At its end, also that of the process that owns it, all
    processes in the hosts are killed and the hosts removed.

    Args:
        hosts: how many, 1 to 254.
        mbit: rate of their links, Mbit/s each way; None: unshaped.
        round_trip_ms: from one host to another and back, milliseconds; 0 for what the kernel takes,
            a tenth of one.
        loss_percent: of the packets that are lost on the way, by chance. What the host's own rules
            lose (`lab.packets`) TCP takes for delayed where it is to be sent.
        congestion: how the hosts' TCP chooses its rate: a name from
            ``/proc/sys/net/ipv4/tcp_available_congestion_control``.
        port_bytes: what the switch's port to each host holds, of packets that wait for its link; 0
            for more than TCP has on its way, as a rule. Links need a rate, and a short way.

    Attributes:
        hosts: the hosts, while the lab exists.
        mbit: the links' rate at the start, in Mbit/s; None if they are unshaped.
    """

    def __init__(
        self,
        hosts: int,
        mbit: float | None = None,
        *,
        round_trip_ms: float = 0.0,
        loss_percent: float = 0.0,
        congestion: str = CONGESTION,
        port_bytes: int = 0,
    ) -> None:
        if not 1 <= hosts <= 254:
            raise ValueError(f"a lab has 1 to 254 hosts, got {hosts}")
        if mbit is not None and not mbit > 0:
            raise ValueError(f"a link's rate is more than 0 Mbit/s, got {mbit}")
        if not (round_trip_ms == 0 or 1 <= round_trip_ms <= 1000):
            raise ValueError(f"a round trip takes 1 to 1000 ms, or 0 for none, got {round_trip_ms}")
        if not 0 <= loss_percent < 100:
            raise ValueError(f"a network loses 0 to 99 % of its packets, got {loss_percent}")
        if port_bytes and (mbit is None or round_trip_ms or loss_percent):
            raise ValueError("a port holds packets for a link with a rate, and a short way")
        self.mbit = mbit
        self._round_trip_ms = round_trip_ms
        self._loss_percent = loss_percent
        self._congestion = congestion
        self._port_bytes = port_bytes
        self.hosts: list[Host] = []
        self._size = hosts
        self._namespaces = True
        self._mark = ""
        self._network: Network | None = None
        self._keeper: subprocess.Popen[str] | None = None
        self._processes: list[subprocess.Popen[str]] = []
        self._payload_rates: dict[tuple[int, int], float] = {}

    @classmethod
    def loopback(cls, hosts: int) -> Lab:
        """Make a lab without root and namespaces, whose hosts are all ``127.0.0.1``, unshaped."""
        lab = cls(hosts)
        lab._namespaces = False
        return lab

    def __enter__(self) -> Lab:
        if self._namespaces:
            require_root()
        self._mark = secrets.token_hex(8)
        self._payload_rates = {}
        try:
            number = self._start_keeper()
        except BaseException:
            self._close()
            raise
        if self._namespaces:
            self._network = Network(number, self._size)
            places = zip(self._network.names, self._network.addresses, strict=True)
        else:
            places = zip(["localhost"] * self._size, ["127.0.0.1"] * self._size, strict=True)
        self.hosts = [Host(self, index, *place) for index, place in enumerate(places)]
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def set_rate(self, host: Host, mbit: float | None) -> None:
        """Give one host's link this rate in Mbit/s, each way; None removes its shaping."""
        if mbit is not None and not mbit > 0:
            raise ValueError(f"a link's rate is more than 0 Mbit/s, got {mbit}")
        self._links(host).shape(host.index, mbit)
        self._payload_rates = {}

    def link_down(self, host: Host) -> None:
        """Pull a host's cable: packets are lost, sockets and addresses stay."""
        self._links(host).connect(host.index, up=False)

    def link_up(self, host: Host) -> None:
        """Plug a host's cable in again."""
        self._links(host).connect(host.index, up=True)

    def payload_rate(self, streams: int = 1, seconds: int | None = None) -> float:
        """Bytes per second that iperf3 carries from host 0 to host 1, as their links are now.

        Measured at the first call with these arguments, and at the first after a `set_rate`: for so
        many seconds, three times, after as many that are left out, in which the shaper's burst
        comes on top, and TCP finds the rate. By default that is 1, or 10 where round trips are long
        or packets are lost.
        """
        seconds = seconds or (IPERF_FAR_S if self._round_trip_ms or self._loss_percent else 1)
        rate = self._payload_rates.get((streams, seconds))
        if rate is None:
            if len(self.hosts) < 2:
                raise LabUnavailable("a payload rate is measured between two hosts: make more")
            rate = _payload_rate(self.hosts[0], self.hosts[1], streams, seconds)
            self._payload_rates[streams, seconds] = rate
        return rate

    def _start(
        self,
        host: Host,
        argv: Sequence[str],
        env: Mapping[str, str],
        streams: tuple[Stream, Stream, Stream],
        cwd: Path | None,
    ) -> subprocess.Popen[str]:
        if host not in self.hosts:
            raise LabUnavailable("the lab has ended: start processes inside its `with` block")
        environment = {**os.environ, **self._describe(host), **env, MARK: self._mark}
        if not shutil.which(argv[0], path=environment.get("PATH")):
            raise FileNotFoundError(
                f"there is no program {argv[0]!r} to start in host {host.index}"
            )
        enter = ["ip", "netns", "exec", host.name] if self._namespaces else []
        stdin, stdout, stderr = streams
        process = subprocess.Popen(
            [*enter, *argv],
            env=environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
            cwd=cwd,
        )
        self._processes.append(process)
        return process

    def _describe(self, host: Host) -> dict[str, str]:
        return {
            "LAB_INDEX": str(host.index),
            "LAB_NAME": host.name,
            "LAB_ADDRESS": host.address,
            "LAB_HOSTS": str(len(self.hosts)),
            "LAB_NAMES": ",".join(other.name for other in self.hosts),
            "LAB_ADDRESSES": ",".join(other.address for other in self.hosts),
            "LAB_MBIT": "" if self.mbit is None else f"{self.mbit:g}",
        }

    def _links(self, host: Host) -> Network:
        if self._network is None:
            raise LabUnavailable("hosts on loopback have no links: use Lab() as root")
        if host not in self.hosts:
            raise LabUnavailable("the host belongs to another lab, or to one that has ended")
        return self._network

    def _start_keeper(self) -> int:
        """Start the process that makes the lab and outlives this one; return the lab's number."""
        facts = Facts(
            self._mark,
            self._size,
            self.mbit,
            os.getpid(),
            " ".join(sys.argv),
            self._round_trip_ms,
            self._loss_percent,
            self._congestion,
            self._port_bytes,
        )
        owner = os.pidfd_open(os.getpid())
        try:
            request = Request(facts, self._namespaces, owner)
            # The keeper needs the standard library alone, and starts at once without the rest.
            self._keeper = subprocess.Popen(
                [sys.executable, "-SE", "-m", "lab", "keep", json.dumps(asdict(request))],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                pass_fds=[owner],
            )
        finally:
            os.close(owner)
        assert self._keeper.stdout
        answer = json.loads(self._keeper.stdout.readline() or "{}")
        if "number" not in answer:
            silent = "the lab's keeper died: what it said is on standard error"
            raise LabUnavailable(answer.get("unavailable", silent))
        return int(answer["number"])

    def _close(self) -> None:
        self.hosts, self._network = [], None
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if self._keeper:
            self._stop_keeper(self._keeper)
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream:
                    with suppress(BrokenPipeError):  # what was written and never read
                        stream.close()
        self._processes, self._keeper = [], None

    def _stop_keeper(self, keeper: subprocess.Popen[str]) -> None:
        assert keeper.stdin
        assert keeper.stdout
        keeper.stdin.close()
        try:
            keeper.wait(STOP_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        keeper.stdout.close()
        if keeper.returncode < 0:  # killed, and with it the only one who would have removed the lab
            tear_down(self._mark, None)
            if self._namespaces:
                clean()


def _payload_rate(sender: Host, receiver: Host, streams: int, seconds: int) -> float:
    """Return the bytes per second that iperf3 receives, the median of `IPERF_RUNS` runs."""
    if not shutil.which("iperf3"):
        raise LabUnavailable("the payload rate is measured with iperf3: install the package iperf3")
    port = str(free_port())
    server = receiver.start(
        ["iperf3", "-s", "-p", port], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        client = ["iperf3", "-c", receiver.address, "-p", port, "-P", str(streams), "-J"]
        client += ["-O", str(seconds), "-t", str(seconds)]
        patience_s = IPERF_RUN_S + 2 * seconds
        runs = (_run_iperf3(sender, client, patience_s) for _ in range(IPERF_RUNS))
        return statistics.median(runs)
    finally:
        server.kill()
        server.wait()


def _run_iperf3(sender: Host, client: list[str], patience_s: float) -> float:
    deadline = time.monotonic() + IPERF_START_S
    while True:
        with sender.start(client, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            try:
                output, _ = process.communicate(timeout=patience_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise LabUnavailable(f"iperf3 did not end within {patience_s:g} s") from None
        report = json.loads(output or "{}")
        # With -J its exit status is 0 whatever happens.
        if received := report.get("end", {}).get("sum_received"):
            return float(received["bits_per_second"]) / 8
        # The server may not listen yet, or not have finished the run before.
        if time.monotonic() > deadline:
            raise LabUnavailable(f"iperf3 failed: {report.get('error', 'it said nothing')}")
        time.sleep(0.05)
