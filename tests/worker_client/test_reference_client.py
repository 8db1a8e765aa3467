"""The reference as a client, and what is said where nothing is compiled."""

import subprocess
import sys

import numpy as np
import pytest

from reducer.errors import ConfigError, ReductionTimeout
from tests.conftest import joined

# Has every compiled module of the worker's missing, and joins a job.
NOT_COMPILED = """
import sys
for name in (
    "protocol._state", "protocol._flight", "runtime._loop", "runtime._caller_lead",
    "fusion._tensor_queue", "staging._cast",
):
    sys.modules[f"worker_client.{name}"] = None
import worker_client, worker_client.reference
worker_client.init(servers="127.0.0.1:1", rank=0, world_size=1)
"""


@pytest.fixture
def plain(monkeypatch):
    monkeypatch.setenv("REDUCTION_IMPL", "plain")


@pytest.mark.usefixtures("plain")
def test_it_makes_blocking_all_reduces(pool):
    with joined(1, servers=pool, job="blocking") as (client,):
        assert client.impl == "plain"
        mine = np.arange(6.0).reshape(2, 3)
        work = client.all_reduce(mine, "sum")
        assert work.done()
        assert work.wait() is mine
        assert (mine == np.arange(6.0).reshape(2, 3)).all()
    assert not client.usable


@pytest.mark.usefixtures("plain")
def test_a_failure_is_raised_by_whoever_waits(pool):
    with joined(2, servers=pool, job="late", timeout="1s") as (client, _):
        work = client.all_reduce(np.ones(4))
        with pytest.raises(ReductionTimeout):
            work.wait()


@pytest.mark.usefixtures("plain")
def test_what_it_does_not_do_says_so(pool):
    with joined(1, servers=pool, job="refused") as (client,):
        for ask in (
            lambda: client.all_reduce(np.ones(4), name="weight"),
            lambda: client.all_reduce(np.ones((4, 4))[:, 1]),
            lambda: client.summary,
            lambda: client.spec,
        ):
            with pytest.raises(ConfigError, match="REDUCTION_IMPL=compiled"):
                ask()
        with pytest.raises(ConfigError, match="mean of int32 is not defined"):
            client.all_reduce(np.ones(4, np.int32))


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(
    "given",
    [
        {"wire_dtype": "bf16"},
        {"on_rank_lost": "continue"},
        {"generation": 1},
        {"join": True, "on_rank_lost": "continue"},
        {"servers": ""},
    ],
)
def test_settings_that_it_does_not_have_are_refused(pool, given):
    with (
        pytest.raises(ConfigError, match="REDUCTION_IMPL=compiled"),
        joined(1, **{"servers": pool, "job": "refused", **given}),
    ):
        pass


def test_what_to_install_where_nothing_is_compiled():
    command = [sys.executable, "-c", NOT_COMPILED]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "ImportError: the compiled modules of the client cannot be loaded" in done.stderr
    assert "a C compiler" in done.stderr
