"""Ray Train: a worker that dies once, and the weights of a training that nothing interrupts."""

import importlib

import numpy as np
import pytest

from tests.conftest import joined, reducer_here
from tests.frameworks.training import LINE, unlaunched
from tests.ranks import ROOT, environments, ranks
from tests.reducer.asked import ask, port_of
from tests.waits import eventually

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


@pytest.mark.filterwarnings("ignore")  # of Ray's own, when it is imported
def test_its_hang_detector_reads_what_reducers_tell(no_settings):
    detector = importlib.import_module("ray.train.v2._internal.callbacks.nccl_ras")

    def report():
        return detector.parse_ras_schema(ask(port, "/ras.json").text)

    with (
        reducer_here() as server,
        port_of(server.observer) as port,
        joined(2, servers=server.address, job="hangs") as (one, other),
    ):
        work = one.all_reduce(np.ones(1000))
        eventually(lambda: report().mismatched_comms)
        first, second = report(), report()
        (change,) = detector.compute_report_op_diff(first, second).values()
        assert change == {0: {"AllReduce": 0}, 1: {"AllReduce": 0}}  # it hangs
        other.all_reduce(np.ones(1000)).wait(20)
        work.wait(20)
        eventually(lambda: report().healthy)
        (change,) = detector.compute_report_op_diff(second, report()).values()
        assert change == {0: {"AllReduce": 0}, 1: {"AllReduce": 1}}
