"""The plug-in's structures are NCCL's: sizes and places of fields, by NCCL's own headers."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.nccl.tables import VERSIONS

ROOT = Path(__file__).parents[2]
HEADERS = os.environ.get("NCCL_HEADERS")  # the folder of `net_v8.h` to `net_v12.h`
# What the headers take from others of NCCL's.
BEFORE = """
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
typedef int ncclResult_t, ncclDataType_t, ncclRedOp_t, ncclNetDeviceType, ncclDebugLogLevel;
typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel, unsigned long, const char *, int,
                                  const char *, ...);
typedef ncclResult_t (*ncclProfilerCallback_t)(void **, int, void *, int64_t, void *);
typedef void ncclNetDeviceHandle_v7_t, ncclNetDeviceHandle_v8_t, ncclNetDeviceHandle_v9_t;
typedef void ncclNetDeviceHandle_v10_t, ncclNetDeviceHandle_v11_t, ncclNetDeviceHandle_v12_t;
"""
NET = {"devices": "devices", "getProperties": "properties", "accept": "accept", "test": "test"}
NET |= {
    "regMr": "register_memory",
    "isend": "send",
    "irecv": "receive",
    "closeSend": "close_sender",
}
NET |= {
    "closeListen": "close_listener",
    "connect": "connect",
    "listen": "listen",
    "iflush": "flush",
}
COLLECTIVE = {"devices": "devices", "reduceSupport": "supports", "iallreduce": "all_reduce"}
COLLECTIVE |= {"closeColl": "close", "closeListen": "close_listener", "test": "test"}
PROPERTIES = {"pciPath": "pci_path", "speed": "speed_mbit", "maxRecvs": "max_receives"}
PROPERTIES |= {"netDeviceVersion": "offload_version"}
SINCE_9 = {"vProps": "merged", "maxCollBytes": "max_collective"}


def pairs(version):
    """Yield NCCL's structure, the library's or the harness's, and NCCL's fields with these."""
    later = {"finalize": "finalize"} if version > 10 else {}
    for ours in ("struct nccl_net", "struct net_table"):
        yield f"ncclNet_v{version}_t", ours, NET | later
    for ours in ("struct nccl_collective", "struct collective_table"):
        yield f"ncclCollNet_v{version}_t", ours, COLLECTIVE | later
    ours = 9 if version == 10 else version
    later = SINCE_9 if version > 8 else {}
    yield f"ncclNetProperties_v{version}_t", f"struct nccl_properties_v{ours}", PROPERTIES | later


@pytest.mark.skipif(
    HEADERS is None, reason="NCCL_HEADERS names no folder with net_v8.h to net_v12.h"
)
@pytest.mark.parametrize("version", VERSIONS)
def test_structures_are_those_of_nccl(tmp_path, version):
    ours = ("worker_client/nccl/abi.h", "tests/nccl/harness.h")
    text = [BEFORE, *(f'#include "{ROOT}/{header}"' for header in ours)]
    for one in dict.fromkeys((11, version)):  # 9 and 10 count devices as 11 does
        header = Path(HEADERS, f"net_v{one}.h").read_text()
        text.append(re.sub(r"#include.*", "", header))
    for theirs, ours, fields in pairs(version):
        # NCCL reads no further than its version's table ends. Properties are written to its memory.
        same = "==" if "Properties" in theirs or version == VERSIONS[-1] else "<="
        text.append(f'_Static_assert(sizeof({theirs}) {same} sizeof({ours}), "size of {theirs}");')
        text += [
            f'_Static_assert(offsetof({theirs}, {one}) == offsetof({ours}, {other}), "{one}");'
            for one, other in fields.items()
        ]
    source = tmp_path / "same.c"
    source.write_text("\n".join(text))
    done = subprocess.run(
        ["cc", "-fsyntax-only", source], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
