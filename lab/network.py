"""The network of one lab: namespaces, a bridge, links, shaping; made and removed by name.

Everything has a name that starts with `PREFIX` and the lab's number, so that whoever knows the
number can remove a lab, whoever made it. All work is done by ``ip`` and ``tc``.
"""

import os
import shutil
import socket
import subprocess
from pathlib import Path

PREFIX = "rlab"
NAMESPACES = Path("/run/netns")  # where ``ip netns`` keeps its names
NAMES = Path("/etc/netns")  # whence ``ip netns exec`` takes a namespace's own /etc/hosts
CONGESTION = "cubic"  # what most kernels use
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")

# A burst has to hold the largest packet that TCP hands down at once (64 KiB); larger ones blur what
# is measured at the start of a transfer. The queue holds what several senders have in flight to one
# receiver, as a switch's buffer would: a smaller one drops, and then TCP's recovery is measured.
BURST_BYTES = 256 << 10
QUEUE_BYTES = 8 << 20
PORT_BURST_BYTES = 16 << 10  # of a port that is to hold no more than it says: a burst is room, too
PORTS = "1"  # interface group of the bridge's ports: one command deletes them all
COMMAND_S = 30.0


class LabUnavailable(RuntimeError):  # noqa: N818 - it is a condition of the machine
    """What was asked of a lab cannot be done on this machine; the message says what would help."""


class Network:
    """Hosts 0 to `hosts` - 1 of the lab with this number; nothing exists before `build`."""

    def __init__(self, number: int, hosts: int) -> None:
        assert 0 <= number <= 255, "the number is a byte of the hosts' addresses"
        assert 1 <= hosts <= 254, "the hosts of a lab share a /24"
        self.prefix = f"{PREFIX}{number}-"
        self.bridge = f"{self.prefix}bridge"
        self.names = [f"{self.prefix}h{index}" for index in range(hosts)]
        self.ports = [f"p{index}" for index in range(hosts)]
        self.addresses = [f"10.77.{number}.{index + 1}" for index in range(hosts)]
        self._port_bytes = 0

    def build(
        self,
        mbit: float | None,
        congestion: str = CONGESTION,
        *,
        bridged: bool = True,
        port_bytes: int = 0,
    ) -> None:
        """Make namespaces, bridge and links.

        Args:
            mbit: rate of the links each way, Mbit/s; None: unshaped.
            congestion: how the hosts' TCP chooses its rate, such as ``bbr``.
            bridged: whether the kernel's bridge joins the ports. Otherwise another program is to,
                and TCP hands down packets as a network carries them, of one segment each.
            port_bytes: of each port's queue towards its host; 0 for a long one.

        Raises:
            LabUnavailable: a tool is missing or the kernel refuses.
        """
        _allow_congestion_control(congestion)
        _batch(["ip"], [f"netns add {name}" for name in (self.bridge, *self.names)])
        # Frames that cross the bridge are not this machine's firewall's business.
        _inside(
            self.bridge,
            "for f in /proc/sys/net/bridge/*-call-*; do ! [ -e $f ] || echo 0 >$f; done",
        )
        lines = ["link add br0 type bridge stp_state 0 mcast_snooping 0", "link set br0 up"]
        master = "master br0" if bridged else "nomaster"
        for name, port in zip(self.names, self.ports, strict=True):
            # Both ends are born where they belong: the machine's own namespace never sees them.
            lines.append(f"link add {port} type veth peer name eth0 netns {name}")
            lines.append(f"link set {port} {master} group {PORTS} up")
        _batch(["ip", "-n", self.bridge], lines)
        self._port_bytes = port_bytes
        for name, address in zip(self.names, self.addresses, strict=True):
            up = ["link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"]
            up += [] if bridged and not port_bytes else ["link set eth0 gso_max_segs 1"]
            _batch(["ip", "-n", name], up)
            _inside(name, f"echo {congestion} >/proc/sys/net/ipv4/tcp_congestion_control")
        self._write_names()
        if mbit is not None:
            for index in range(len(self.names)):
                self.shape(index, mbit)

    def shape(self, index: int, mbit: float | None) -> None:
        """Give a host's link this rate in Mbit/s, each way; None removes the shaping."""
        card = f"burst {BURST_BYTES} limit {QUEUE_BYTES}"
        bounded = f"burst {PORT_BURST_BYTES} limit {self._port_bytes}"
        ends = (
            (self.bridge, self.ports[index], bounded if self._port_bytes else card),
            (self.names[index], "eth0", card),
        )
        for namespace, device, queue in ends:
            kind = "noqueue" if mbit is None else f"tbf rate {round(mbit * 1e6)}bit {queue}"
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *kind.split())

    def connect(self, index: int, *, up: bool) -> None:
        """Plug a host's cable in, or pull it at the bridge: the host keeps address and sockets."""
        _run("ip", "-n", self.bridge, "link", "set", self.ports[index], "up" if up else "down")

    def namespaces(self) -> list[Path]:
        """List the namespaces that exist under the lab's names, also those of a half-built one."""
        return sorted(NAMESPACES.glob(f"{self.prefix}*"))

    def remove(self) -> None:
        """Remove everything of this lab that exists; it is no error if nothing does."""
        namespaces = self.namespaces()
        if NAMESPACES / self.bridge in namespaces:
            # Links first: a namespace, and its link, outlives its name while a process is in it.
            _run("ip", "-n", self.bridge, "link", "delete", "group", PORTS, check=False)
        for path in namespaces:
            _run("ip", "netns", "delete", path.name, check=False)
        for path in NAMES.glob(f"{self.prefix}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _write_names(self) -> None:
        hosts = zip(self.addresses, self.names, strict=True)
        table = "127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for at, name in hosts)
        for name, address in zip(self.names, self.addresses, strict=True):
            # Libraries look up the machine's name to learn which address others can reach.
            own = f"{address} {socket.gethostname()}\n"
            try:
                (NAMES / name).mkdir(parents=True, exist_ok=True)
                (NAMES / name / "hosts").write_text(table + own)
            except OSError as error:
                raise LabUnavailable(f"a lab writes hosts files below {NAMES}: {error}") from error


def require_root() -> None:
    """Raise `LabUnavailable` unless this process may make namespaces at all."""
    if os.geteuid() != 0:
        raise LabUnavailable(
            "a lab of network namespaces needs root: run it with sudo, or use Lab.loopback()"
        )


def _allow_congestion_control(name: str) -> None:
    # A namespace may only be given an algorithm that everybody may use. Allowing one is the only
    # setting of the machine itself that a lab changes; it stays, as another lab may rely on it.
    try:
        allowed = ALLOWED.read_text().split()
        if name not in allowed:
            ALLOWED.write_text(" ".join([*allowed, name]))
    except OSError as error:
        raise LabUnavailable(
            f"TCP {name} cannot be allowed ({error}): "
            f"load it with `modprobe tcp_{name}` and let this process write {ALLOWED}"
        ) from error


def _inside(namespace: str, script: str) -> None:
    _run("ip", "netns", "exec", namespace, "sh", "-c", script)


def _batch(command: list[str], lines: list[str]) -> None:
    _run(*command, "-batch", "-", lines=lines)


def _run(*command: str, lines: list[str] | None = None, check: bool = True) -> None:
    text = "".join(f"{line}\n" for line in lines or [])
    said = ""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        failed, said = done.returncode != 0, done.stderr.strip()
    except FileNotFoundError as error:
        raise LabUnavailable(f"`{command[0]}` is missing: install the package iproute2") from error
    except subprocess.TimeoutExpired:
        failed, said = True, f"no end within {COMMAND_S:g} s"
    if failed and check:
        raise LabUnavailable(
            f"`{' '.join(command)}` failed: {said}. A lab needs a kernel with network namespaces, "
            "veth, bridge and tbf, and the capabilities CAP_NET_ADMIN and CAP_SYS_ADMIN"
        )
