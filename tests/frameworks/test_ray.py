"""Ray Train: a worker that dies once, and the weights of a training that nothing interrupts."""

import pytest

from tests.frameworks.training import LINE, unlaunched
from tests.ranks import ROOT, environments, ranks

for package in ("torch", "sklearn", "ray"):
    pytest.importorskip(package, reason=f"needs {package}")

pytestmark = pytest.mark.timeout(600)
EXAMPLE = ROOT / "examples" / "ray_digits.py"


def train(*arguments, servers=()):
    """Run the example; return each rank's loss, weights and bytes reduced, as text."""
    (given,) = environments(1, servers, RAY_USAGE_STATS_ENABLED="0")
    with ranks([unlaunched(given)], EXAMPLE, *arguments, fresh=True) as driver:
        (said,) = driver.outputs(300)
    ends = sorted(LINE.findall(said))
    assert [rank for rank, *_ in ends] == ["0", "1"], said
    return [end[1:] for end in ends]


@pytest.fixture(scope="module")
def stock():
    """What the ranks come to over Gloo, undisturbed."""
    return train("--stock")


@pytest.mark.parametrize("how", [(), ("--backend",)], ids=["attach", "backend"])
def test_a_worker_dies_once_and_the_weights_are_those_of_gloo(how, servers, stock, tmp_path):
    told = tmp_path / "die"
    told.touch()
    ends = train(*how, "--dies", told, servers=servers)
    assert not told.exists()  # it has died
    # Sums of two do not depend on their order, and the checkpoint has all of the optimizer.
    assert [end[:2] for end in ends] == [end[:2] for end in stock]
    assert all(int(reduced) > 0 for *_, reduced in ends)
    assert all(reduced == "0" for *_, reduced in stock)
