"""Real Accelerate and transformers, real processes: the line that attaches, against Gloo."""

import pytest

from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("accelerate", reason="needs accelerate")

pytestmark = pytest.mark.timeout(300)
MIB = 1 << 20


def cases(folder, group, servers, **settings):
    given = environments(2, servers, TQDM_DISABLE="1", **settings)
    command = ("-m", "tests.frameworks.accelerate_cases", group, folder / "checkpoints")
    return run(given, *command)


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory, servers):
    return cases(tmp_path_factory.mktemp("accelerate"), "accelerate", servers)


@pytest.fixture(scope="module")
def transformers(tmp_path_factory, servers):
    pytest.importorskip("transformers", reason="needs transformers")
    return cases(tmp_path_factory.mktemp("transformers"), "transformers", servers)


@pytest.fixture(scope="module")
def refusals(tmp_path_factory, servers):
    return cases(tmp_path_factory.mktemp("refusals"), "refusals", servers)


def assert_same(ranks, case):
    for rank in ranks:  # a sum of two does not depend on their order
        assert rank["ours"][case]["digest"] == rank["stock"][case]["digest"]
        assert rank["ours"][case]["bytes"] > 0


@pytest.mark.parametrize("case", ["default", "accumulate", "bf16", "unused", "no_sync"])
def test_two_ranks_get_the_bits_that_they_get_over_gloo(accelerate, case):
    assert_same(accelerate, case)


def test_what_was_asked_for_reaches_ddp(accelerate):
    for rank in accelerate:
        seen = rank["ours"]
        assert seen["default"]["bucket_cap"] == 64 * MIB
        assert seen["unused"]["bucket_cap"] == MIB
        assert [seen["default"]["find_unused"], seen["unused"]["find_unused"]] == [False, True]


def test_fewer_bytes_without_synchronisation_or_with_compression(accelerate):
    for rank in accelerate:
        seen = {case: end["bytes"] for case, end in rank["ours"].items()}
        assert seen["accumulate"] == seen["default"] / 2
        assert seen["no_sync"] == seen["default"] / 4  # half of one epoch instead of two
        assert seen["fp16_wrapper"] == seen["bf16_wrapper"] == seen["default"] / 2


def test_all_ranks_have_the_same_bits(accelerate):
    first, second = (rank["ours"] for rank in accelerate)
    assert {case: end["digest"] for case, end in first.items()} == {
        case: end["digest"] for case, end in second.items()
    }


@pytest.mark.parametrize("case", ["default", "resumed", "bf16", "chosen"])
def test_the_trainer_of_transformers_gets_the_bits_that_it_gets_over_gloo(transformers, case):
    assert_same(transformers, case)


def test_the_trainer_of_transformers_keeps_its_own_choices(transformers):
    for rank in transformers:
        seen = rank["ours"]
        assert seen["default"]["find_unused"]  # its default
        assert [seen["default"]["bucket_cap"], seen["chosen"]["bucket_cap"]] == [64 * MIB, 8 * MIB]
        assert seen["resumed"]["steps"] == seen["default"]["steps"] == 8
        assert seen["resumed"]["bytes"] == seen["default"]["bytes"] / 2


def test_the_trainer_takes_a_process_group_of_the_backend_that_it_would_not_make(
    transformers, tmp_path, servers
):
    for rank, other in zip(cases(tmp_path, "backend", servers), transformers, strict=True):
        assert rank["said"].startswith("Your assigned backend reduction is not available")
        assert rank["default"]["digest"] == other["stock"]["default"]["digest"]
        assert rank["reduced"] > 0


def test_an_embedded_job_needs_no_reducers(tmp_path):
    for rank in cases(tmp_path, "transformers", []):
        assert rank["ours"]["default"]["digest"] == rank["stock"]["default"]["digest"]


@pytest.mark.parametrize(
    ("case", "fix"),
    [
        ("twice", "call it once"),
        ("late", "call attach() before prepare()"),
        ("hook", "comm_wrapper=FP16"),
        ("model", "trainer.accelerator"),
    ],
)
def test_refuses_and_names_the_fix(refusals, case, fix):
    assert all(fix in rank[case] for rank in refusals)


def test_a_model_for_evaluation_may_be_prepared_before(refusals):
    assert [rank["after one for evaluation"] for rank in refusals] == ["None"] * len(refusals)


def test_a_process_alone_is_told_how_to_start(tmp_path, servers):
    ranks = cases(tmp_path, "alone", servers, WORLD_SIZE="1")
    assert all("accelerate launch" in rank["alone"] for rank in ranks)
