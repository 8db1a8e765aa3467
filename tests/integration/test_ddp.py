"""Real DDP, real processes: every option against Gloo, errors that leave the model usable."""

from contextlib import nullcontext

import pytest

from tests.conftest import local_pool
from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")

from tests.integration.ddp_cases import OPTIONS, SEGMENTS


def run_cases(world_size, group, reducers):
    """Run a group of `ddp_cases` at every rank and return the results."""
    with local_pool(reducers) if reducers else nullcontext([]) as servers:
        given = environments(world_size, servers)
        return run(given, "-m", "tests.integration.ddp_cases", group)


@pytest.fixture(scope="module")
def options():
    return run_cases(2, "options", reducers=2)


@pytest.fixture(scope="module")
def failures():
    return run_cases(2, "failures", reducers=2)


def assert_same_training(ranks, case):
    for rank in ranks:
        gloo, reduction = rank[case]["gloo"], rank[case]["reduction"]
        assert len(gloo["losses"]) >= 40
        assert reduction["losses"] == pytest.approx(gloo["losses"], rel=1e-5)
        assert gloo["losses"][-1] < gloo["losses"][0]  # it did learn something
    assert len({rank[case]["reduction"]["digest"] for rank in ranks}) == 1


@pytest.mark.parametrize("case", OPTIONS)
def test_trains_like_gloo_with_every_option(options, case):
    assert_same_training(options, case)


def test_the_reducers_did_the_work(options):
    # 50 steps of at least the model's 9 KiB, in eight cases and a half and a repetition.
    assert all(rank["bytes_reduced"] > 9 * 50 * 9_000 for rank in options)


def test_a_second_run_gives_the_same_bits(options):
    for rank in options:
        assert rank["repeat"]["reduction"] == rank["many_buckets"]["reduction"]


@pytest.mark.extended_cases("3")
@pytest.mark.parametrize("reducers", [0, 3])
def test_three_ranks_in_fp32(reducers):
    # Without servers every rank hosts a reducer: the embedded default.
    trained = run_cases(3, "fp32", reducers)
    assert_same_training(trained, "find_unused_parameters")
    for rank in trained:
        left = rank["join_of_who_is_left"]
        assert left["reduction"]["losses"] == pytest.approx(left["gloo"]["losses"], rel=1e-5)


def test_backward_raises_the_typed_error_and_the_next_step_works(failures):
    for rank in failures:
        assert rank["errors"]["seen"] == ["ok", "ok", "ReductionTimeout (1,)", "ok", "ok"]
    assert failures[0]["errors"]["raised_after"][0] < 30


def test_buffers_are_those_of_the_first_rank_and_reducers_see_who_is_late(failures):
    first, second = (rank["buffers"] for rank in failures)
    assert first["mine"] != second["mine"]
    assert first["theirs"] == second["theirs"] == first["mine"]
    assert first["waited_s"] > 0.5, "rank 1 was late by 2 s, and the client did not see it"
    assert first["hooked"] == list(first["mine"]), "a user's own hook has them instead"


@pytest.mark.parametrize("kind", SEGMENTS)
def test_backward_raises_what_failed_in_a_nested_one(failures, kind):
    first, second = (rank["nested_errors"] for rank in failures)
    assert first[kind]["seen"] == second[kind]["seen"] == ["", "", "MismatchError", ""]
    for step in (0, 1, 3):
        assert first[kind]["digests"][step] == second[kind]["digests"][step]
        assert first[kind]["digests"][step] == first["plain"]["digests"][step]


def test_sparse_gradients_end_in_an_error_of_backward(failures):
    assert all("sparse" in rank["sparse_in_hook"] for rank in failures)


def test_an_attached_model_can_be_copied_and_saved(failures):
    for rank in failures:
        assert [what for what, holds in rank["copies"].items() if not holds] == []


def test_torchs_profiler_shows_each_bucket_until_its_result_is_there(failures):
    for rank in failures:
        assert [*rank["profiled"]] == ["reduction: bucket 0"]
    early, late = (rank["profiled"]["reduction: bucket 0"] for rank in failures)
    assert early > 40 > late


@pytest.mark.parametrize(
    ("case", "fix"),
    [
        ("bare", "attach(DistributedDataParallel(model))"),
        ("sparse", "sparse=False"),
        ("second", "remove the other attach() or register_comm_hook() call"),
        ("builtin", "fp16_compress_wrapper(reduction_hook)"),
        ("mixed_precision", "torch.autocast"),
        ("python_reducer", "optimize_ddp at its default"),
        ("delay_all_reduce", "wrap the model without it"),
        ("sub_group", "rank 0 of 1"),
    ],
)
def test_attach_refuses_and_names_the_fix(failures, case, fix):
    assert all(fix in rank["refusals"][case] for rank in failures)
