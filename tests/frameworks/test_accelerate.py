"""Real Accelerate, real processes: the line that attaches, against Gloo."""

import pytest

from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("accelerate", reason="needs accelerate")

RANK = ("-m", "tests.frameworks.accelerate_cases")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("embedded", "case"),
    [
        (False, "case_options"),
        (True, "case_options"),
        (False, "case_a_state"),
        (False, "case_refusals"),
        (False, "case_who_is_alone"),
        (False, "case_backend"),
    ],
)
def test_case(servers, embedded, case):
    given = environments(2, [] if embedded else servers, TQDM_DISABLE="1")
    for rank in run(given, *RANK, case):
        assert set(rank.values()) == {""}
