"""Real Lightning, real processes: the strategy against Lightning's own, and its whole life."""

import pytest

from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("lightning", reason="needs lightning")

pytestmark = pytest.mark.timeout(300)
MIB = 1 << 20


def cases(folder, group, servers, package="lightning.pytorch"):
    command = ("-m", "tests.frameworks.lightning_cases", group, package, folder / "checkpoints")
    return run(environments(2, servers, TQDM_DISABLE="1"), *command)


@pytest.fixture(scope="module")
def options(tmp_path_factory, servers):
    return cases(tmp_path_factory.mktemp("lightning"), "options", servers)


@pytest.fixture(scope="module")
def again(tmp_path_factory, servers):
    return cases(tmp_path_factory.mktemp("lightning"), "again", servers)


@pytest.mark.parametrize("case", ["default", "unused", "accumulate", "bf16", "small_buckets"])
def test_two_ranks_get_the_bits_that_they_get_over_gloo(options, case):
    for rank in options:  # a sum of two does not depend on their order
        assert rank[case]["ours"]["digest"] == rank[case]["stock"]["digest"]
        assert rank[case]["ours"]["bytes"] > 0
        assert rank[case]["ours"]["left"]
        assert rank[case]["stock"]["bytes"] == 0


def test_what_was_asked_for_reaches_ddp(options):
    for rank in options:
        assert rank["default"]["ours"]["bucket_cap"] == 64 * MIB
        assert rank["small_buckets"]["ours"]["bucket_cap"] == MIB
        assert rank["unused"]["ours"]["find_unused"]
        assert not rank["default"]["ours"]["find_unused"]


def test_fewer_bytes_with_accumulation_or_compression(options):
    for rank in options:
        plain = rank["default"]["ours"]["bytes"]
        assert rank["accumulate"]["ours"]["bytes"] == plain / 2
        assert rank["wrapper"]["bytes"] == plain / 2
    assert options[0]["wrapper"]["digest"] == options[1]["wrapper"]["digest"]


def test_the_environment_is_the_launchers(options):
    assert [rank["environment"] for rank in options] == [[0, 2, 0, 0, True], [1, 2, 0, 1, True]]


def test_processes_on_several_machines(options):
    for rank in options:
        assert rank["environments"]["named"] == [3, 4, 1, 5, "first", 29500]
        assert rank["environments"]["counted"] == [3, 4, 1, 1, "first", 29500]


@pytest.mark.parametrize(
    ("case", "fix"),
    [
        ("hook", "Lightning's DDPStrategy without reducers"),
        ("averaging", "give all three, or none"),
        ("devices", "devices=1 and num_nodes=2"),
        ("machines", "devices=2 and num_nodes=2"),
        ("launcher", "did not set RANK and MASTER_PORT: start the script with torchrun"),
    ],
)
def test_refuses_and_names_the_fix(options, case, fix):
    assert all(fix in rank["refusals"][case] for rank in options)


def test_a_resumed_training_ends_with_the_same_bits(again):
    for rank in again:
        assert rank["half"]["digest"] != rank["straight"]["digest"]
        assert rank["resumed"]["digest"] == rank["straight"]["digest"]


def test_a_second_fit_joins_anew(again):
    for rank in again:
        assert rank["twice"]["ours"]["digest"] == rank["twice"]["stock"]["digest"]
        assert rank["twice"]["ours"]["two_clients"]
        assert rank["twice"]["ours"]["left"] == [True, True]


def test_a_client_that_the_user_made_is_used_and_left_running(again):
    for rank in again:
        assert rank["still_usable"]
        assert not rank["kept"]["left"]
        assert not rank["passed"]["left"]
        assert rank["kept"]["digest"] == rank["half"]["digest"]
        assert rank["bytes_of_mine"] == 2 * rank["half"]["bytes"]


def test_an_embedded_job_fits_several_times(tmp_path):
    for rank in cases(tmp_path, "again", []):
        assert rank["straight"]["hosts"]
        assert rank["resumed"]["digest"] == rank["straight"]["digest"]
        assert rank["still_usable"]


def test_a_rank_that_hosts_a_reducer_waits_for_the_others(tmp_path):
    first, second = cases(tmp_path, "goodbye", [])
    assert second["woke"] < first["returned"]


@pytest.mark.parametrize("embedded", [False, True])
def test_a_rank_that_raises_keeps_nobody_waiting(tmp_path, servers, embedded):
    first, second = cases(tmp_path, "failure", [] if embedded else servers)
    assert second["text"] == "this rank gives up"
    assert first["typed"], first
    assert embedded or first["error"] == "RankLostError", first
    assert first["left"]
    assert second["left"]
    assert max(first["took_s"], second["took_s"]) < 60


def test_fabric_trains_as_it_does_over_gloo(tmp_path, servers):
    for rank in cases(tmp_path, "fabric", servers):
        assert rank["ours"]["digest"] == rank["stock"]["digest"]
        assert rank["ours"]["bytes"] > 0


def test_the_other_lightning_is_served_too(tmp_path, servers):
    pytest.importorskip("pytorch_lightning", reason="needs pytorch_lightning")
    ranks = cases(tmp_path, "default", servers, package="pytorch_lightning")
    assert len({rank["ours"]["digest"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["base"].startswith("pytorch_lightning.")
        assert rank["ours"]["bytes"] > 0
