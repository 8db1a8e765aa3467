"""FSDP with replicas: the example at other numbers of ranks, and what is refused."""

import pytest

from tests.frameworks.training import assert_alike, train
from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("sklearn", reason="needs scikit-learn")


@pytest.mark.timeout(300)
def test_two_shards_of_two_replicas(servers):
    ours = train("fsdp_digits.py", servers=servers, workers=4)
    assert_alike(ours, train("fsdp_digits.py", "--stock", workers=4))
    # Every rank sends its shard of the gradients, and no more but for what pads it.
    parameters = 64 * 128 + 128 + 128 * 10 + 10
    assert sum(end.bytes_reduced for end in ours) == pytest.approx(
        2 * 4 * parameters * 100, rel=0.02
    )


@pytest.mark.timeout(300)
def test_without_servers_the_replicas_host_reducers():
    assert len({end.weights for end in train("fsdp_digits.py", workers=4)}) == 1


@pytest.fixture(scope="module")
def cases(servers):
    return run(environments(2, servers), "-m", "tests.frameworks.fsdp_cases")


def test_no_shard_trains_like_ddp(cases):
    assert cases[0]["no_shard"] == cases[1]["no_shard"]
    for case in cases:
        assert case["no_shard"]["ours"] == pytest.approx(case["no_shard"]["stock"], rel=1e-5)
        assert case["no_shard"]["bytes_reduced"] > 0


def test_reduce_dtype_is_what_travels(cases):
    assert [case["bfloat16"] for case in cases] == [[129.0, 2]] * 2


def test_an_error_is_raised_by_backward(cases):
    assert cases[0]["late"] == "ReductionTimeout (1,)"


@pytest.mark.parametrize(
    ("case", "fix"),
    [
        ("bare", "fully_shard(model, mesh=mesh['shard'])"),
        ("sharded", "attach(model, mesh['replicate'])"),
        ("replicated", "with one dimension of it"),
        ("other_dimension", "pass the other dimension"),
        ("full_shard", "or NO_SHARD"),
        ("second", "once"),
        ("other_client", "rank 0 of 1"),
    ],
)
def test_attach_refuses_and_names_the_fix(cases, case, fix):
    assert all(fix in rank["refusals"][case] for rank in cases), cases[0]["refusals"][case]
