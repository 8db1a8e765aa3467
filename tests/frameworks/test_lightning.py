"""Real Lightning, real processes: the strategy against Lightning's own, and its whole life."""

import pytest

from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("lightning", reason="needs lightning")

RANK = ("-m", "tests.frameworks.lightning_cases")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("package", "embedded", "cases"),
    [
        ("lightning.pytorch", False, "case_fits"),
        ("lightning.pytorch", False, "case_the"),
        ("lightning.pytorch", False, "case_a_checkpoint"),
        ("lightning.pytorch", False, "case_fabric"),
        ("lightning.pytorch", False, "case_more"),
        ("lightning.pytorch", False, "case_who_raises"),
        ("lightning.pytorch", True, "case_more"),
        ("lightning.pytorch", True, "case_other_ranks"),
        ("lightning.pytorch", True, "case_who_raises"),
        ("pytorch_lightning", False, "case_a_fit"),
    ],
)
def test_case(servers, package, embedded, cases):
    pytest.importorskip(package, reason=f"needs {package}")
    given = environments(2, [] if embedded else servers, TQDM_DISABLE="1")
    for rank in run(given, *RANK, package, cases):
        assert set(rank.values()) == {""}
