"""Tensors on types of devices that are not staged: what `other_device_cases` does at two ranks."""

import pytest

from tests.ranks import case_names, environments, ranks

MODULE = "tests.integration.other_device_cases"
KINDS = ("lazy", "private")


@pytest.fixture(scope="module")
def went(request, pool):
    """What went wrong with each case on a device, at both ranks."""
    with ranks(environments(2, pool), "-m", MODULE, request.param) as job:
        return job.results()


@pytest.mark.parametrize(
    ("went", "case"),
    [(kind, case) for kind in KINDS for case in case_names(MODULE)],
    indirect=["went"],
    scope="module",  # of the run, in which all its cases are
)
def test_case(went, case):
    assert [rank[case] for rank in went] == ["", ""]
