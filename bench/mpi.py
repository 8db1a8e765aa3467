"""Open MPI on the hosts of a lab."""

from collections.abc import Sequence
from pathlib import Path

from lab.lab import Host

# Open MPI starts a daemon on every host with `AGENT HOST COMMAND`, as it would with ssh.
AGENT = Path(__file__).with_name("mpi_agent.sh")
# TCP alone: shared memory would leave the links, and the comparison, out. Ranks that wait yield the
# processor, which they share with everybody here.
SETTINGS = {"pml": "ob1", "btl": "tcp,self", "mpi_yield_when_idle": "1"}


def command(hosts: Sequence[Host], program: Sequence[str]) -> list[str]:
    """Return the command, for host 0, that starts `program` once on every host."""
    settings = dict(SETTINGS)
    if len({host.address for host in hosts}) > 1:
        settings |= {"plm_rsh_agent": str(AGENT), "oob_tcp_if_include": "eth0"}
        settings |= {"btl_tcp_if_include": "eth0"}
        where = ["--host", ",".join(f"{host.name}:1" for host in hosts)]
    else:
        settings |= {"btl_tcp_if_include": "lo"}
        where = ["--oversubscribe"]
    options = [word for name, value in settings.items() for word in ("--mca", name, value)]
    return [
        "mpirun",
        "--allow-run-as-root",
        *("--np", str(len(hosts)), *where, *options),
        *("--bind-to", "none", *program),
    ]
