"""What imports what beside the product, also in functions and for type checkers alone."""

from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("bench", "harness", "hostile", "lab", "torture")


@pytest.fixture(scope="module")
def imports():
    return grimp.build_graph(*FOLDERS, exclude_type_checking_imports=False, cache_dir=None)


def test_imports_have_no_circle(imports):
    uses = {module: imports.find_modules_directly_imported_by(module) for module in imports.modules}
    assert {"bench.report", "lab.lab"} <= set(uses)
    TopologicalSorter(uses).prepare()  # CycleError names the modules of a circle


def test_attacks_stand_on_benchmarks_these_on_the_harness_and_that_on_the_lab(imports):
    floors = ({"torture", "hostile"}, {"bench"}, {"harness"}, {"lab"})
    assert not imports.find_illegal_dependencies_for_layers(floors)
