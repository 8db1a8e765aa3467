"""Which shared libraries a compiled reducer and a compiled client have in their memory."""

import os
import sys
from pathlib import Path

from reducer.commands.keygen import keygen
from tests.commands import run_command, serving

# The only rank of a job; it prints what is in its memory.
CLIENT = """
import sys
from pathlib import Path
import numpy
import worker_client
client = worker_client.init(rank=0, world_size=1, servers=sys.argv[1])
assert client.impl == "compiled", client.impl
assert (client.all_reduce(numpy.ones(1000, numpy.float32)).wait(20) == 1).all()
print(Path("/proc/self/maps").read_text())
client.shutdown()
"""


def libraries(maps):
    return {Path(line.split()[-1]).name for line in maps.splitlines() if ".so" in line}


def test_they_have_libsodium_and_no_libzmq(tmp_path):
    keygen(tmp_path / "keys", ["train"])
    env = {**os.environ, "REDUCTION_JOB": "train"}
    env["REDUCTION_KEYS"] = str(tmp_path / "keys/jobs/train")
    with serving("--keys", tmp_path / "keys/pool") as reducer:
        rank = run_command(sys.executable, "-c", CLIENT, reducer.address, env=env)
        assert rank.returncode == 0, rank.stderr
        maps = rank.stdout, Path(f"/proc/{reducer.process.pid}/maps").read_text()
    for found in map(libraries, maps):
        assert [name for name in found if name.startswith("libsodium")]
        assert [name for name in found if "zmq" in name] == []
