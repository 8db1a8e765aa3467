"""The process-group backend in real processes: what Gloo cannot be asked for, and a fallback."""

import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from reducer.errors import ConfigError
from tests.conftest import local_pool
from tests.integration.test_gloo_checks import check
from tests.ranks import case_names, environments, ranks, run
from tests.waits import eventually

torch = pytest.importorskip("torch", reason="needs torch")

RANKS = 3
MODULE = "tests.integration.backend_rank"
RANK = ("-m", MODULE)
CHECKS = (
    *("all_reduce", "reduce_scatter", "broadcast", "all_gather", "scatter", "barriers"),
    *("a handle", "callbacks", "tensor", "DDP, by default", "DDP, FP16_COMPRESS", "compiled"),
    *("joined unevenly", "sharded", "gathered", "objects", "sent", "received", "monitored"),
    *("exchanged", "reduce, ", "together"),
)
BY_NAME = """
import sys
import torch
import torch.distributed as dist
from tests.ranks import write_result
assert "worker_client.torch_backend" not in sys.modules
dist.init_process_group("reduction")
tensor = torch.ones(3)
dist.all_reduce(tensor)
write_result([tensor.tolist(), dist.group.WORLD.client.bytes_reduced])
"""


# What torch looks for in a Python class, and what neither sends anything nor waits for anybody.
WITHOUT_GLOO = {
    *("abort", "getRank", "getSize", "getGroupName", "setGroupName"),
    *("getGroupDesc", "setGroupDesc", "splitGroup", "mergeRemoteGroup", "get_reconfigure_handle"),
    *("reconfigure", "start_coalescing", "end_coalescing"),
}


def test_every_collective_that_torch_looks_for_is_ours():
    """One that is not ours is called with the GIL, and may wait for ever (`torch_backend`)."""
    from worker_client.torch_backend import ReductionGroup  # noqa: PLC0415 (it imports torch)

    include = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    (header,) = include.rglob("PyProcessGroup.hpp")
    text = re.sub(r"//.*|/\*.*?\*/", "", header.read_text())
    group = r"static_cast<const ProcessGroup\*>\(this\)"
    found = set(re.findall(rf'get_override\(\s*{group},\s*"(\w+)"', text))
    found |= set(re.findall(r"_OVERRIDE\w*\([^;]*?\bProcessGroup,\s*(\w+)", text))
    assert {"allreduce", "barrier", "recv"} <= found
    assert found - WITHOUT_GLOO - set(vars(ReductionGroup)) == set()


def test_a_torch_that_is_too_old_is_refused(monkeypatch):
    from worker_client import torch_backend  # noqa: PLC0415 (it imports torch)

    torch_backend.register()
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.6.0+cpu"))
    with pytest.raises(ConfigError, match=r"needs torch 2\.7 or later, this is 2\.6\.0"):
        torch_backend.register()


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch has looked for names since 2.14")
def test_a_script_needs_the_name_alone():
    assert run(environments(2), "-c", BY_NAME) == [[[2.0] * 3, 12]] * 2


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("reduction", 2), id="pool"),
        pytest.param(
            ("cpu:reduction,cuda:reduction", 0),
            marks=pytest.mark.extended("test_case"),
            id="embedded",
        ),
    ],
)
def went(request, pool):
    """What went wrong with each case, by a backend's name and with so many reducers."""
    backend, reducers = request.param
    return run(environments(RANKS, pool[:reducers]), *RANK, backend)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", case_names(MODULE))
def test_case(went, case):
    assert [rank[case] for rank in went] == [""] * RANKS


@pytest.mark.timeout(300)
def test_a_script_sees_what_it_sees_over_gloo():
    """With an odd number of ranks, which host the reducers; test_gloo_checks.py has all checks."""
    assert len(check(RANKS, "cpu:reduction,cuda:reduction", names=CHECKS)) >= 150


@pytest.mark.timeout(300)
def test_groups_go_on_through_gloo_when_no_reducer_is_left(tmp_path):
    ended = tmp_path / "ended"
    with ExitStack() as stack:
        with local_pool(1) as servers:
            settings = {
                "REDUCTION_FALLBACK": "process-group",
                "REDUCTION_JOB": "train",  # of which each group makes a name of its own
            }
            given = environments(RANKS, servers, **settings)
            job = stack.enter_context(ranks(given, *RANK, "reduction", ended))
            eventually(lambda: all("reduced" in rank.out for rank in job), 200.0)
        ended.touch()
        ends = job.results(250)
    assert [end["totals"] for end in ends] == [[[6.0, 3.0]] * 4, [[6.0, 3.0]] * 4, [[6.0]] * 4]
    assert [end["used"] for end in ends] == [[True, True], [True, True], [True]]
