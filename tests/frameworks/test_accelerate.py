"""Real Accelerate and transformers, real processes: the line that attaches, against Gloo."""

import pytest

from tests.ranks import environments, run

pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("accelerate", reason="needs accelerate")

RANK = ("-m", "tests.frameworks.accelerate_cases")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("needs", "embedded", "case"),
    [
        ("accelerate", False, "case_options"),
        ("accelerate", False, "case_refusals"),
        ("accelerate", False, "case_who_is_alone"),
        ("transformers", False, "case_transformers"),
        ("transformers", True, "case_transformers"),
        ("transformers", False, "case_backend"),
    ],
)
def test_case(servers, tmp_path, needs, embedded, case):
    pytest.importorskip(needs, reason=f"needs {needs}")
    given = environments(2, [] if embedded else servers, TQDM_DISABLE="1")
    for rank in run(given, *RANK, tmp_path, case):
        assert set(rank.values()) == {""}
