"""How much memory jobs may take where there is less than was asked for."""

import pytest

from reducer.config import load
from reducer.errors import ConfigError
from reducer.memory import memory_limit

MIB = 1 << 20
LIMIT, UNLIMITED = f"{512 * MIB}\n", "9223372036854771712\n"
POD = b"0::/pod/reducer\n"
V1 = "memory.limit_in_bytes"
V1_ROOT = f"memory/{V1}"
# What /proc/self/cgroup says, and files below /sys/fs/cgroup.
GROUPS = {
    "a group around it": (POD, {"pod/memory.max": LIMIT, "pod/reducer/memory.max": "max\n"}),
    "the lowest": (POD, {"pod/memory.max": f"{600 * MIB}\n", "pod/reducer/memory.max": LIMIT}),
    "seen from inside": (b"0::/\n", {"memory.max": LIMIT}),
    "it is elsewhere": (b"0::/../other\n", {"memory.max": LIMIT}),
    "version 1": (b"3:cpu:/a\n2:memory:/a:b\n", {f"memory/a:b/{V1}": LIMIT, V1_ROOT: UNLIMITED}),
    "version 1, elsewhere": (b"2:memory:/docker/1\n", {V1_ROOT: LIMIT}),
    "several controllers": (b"2:memory,hugetlb:/a\n", {f"memory,hugetlb/a/{V1}": LIMIT}),
    "a name of any bytes": (b"0::/\xff\xe2\x80\xa8\n", {"memory.max": LIMIT}),
}


def limit_in(system, group, files, **settings):
    (system / "proc/self").mkdir(parents=True)
    (system / "proc/self/cgroup").write_bytes(group)
    for name, text in files.items():
        file = system / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return memory_limit(load(**settings), system)


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_is_the_limit(tmp_path, name):
    # But for 64 MiB of the process itself, and an eighth that comes on top of what jobs may take.
    assert limit_in(tmp_path, *GROUPS[name], memory_limit="900GiB") == 448 * MIB * 8 // 9


@pytest.mark.parametrize("limit", ["max\n", UNLIMITED, "what?\n"])
def test_what_was_asked_for_is_the_limit(tmp_path, limit):
    assert limit_in(tmp_path, b"0::/\n", {"memory.max": limit}, memory_limit="5MiB") == 5 * MIB


def test_too_little_for_any_job_is_refused(tmp_path):
    files = {"memory.max": f"{66 * MIB}\n"}
    with pytest.raises(ConfigError, match=f"give it at least {72 * MIB}"):
        limit_in(tmp_path, b"0::/\n", files, threads=4)
