"""Horovod's TensorFlow and Keras interfaces through real reducers."""

from importlib.util import find_spec

import pytest

from tests.ranks import case_names

# Looked for and not imported, as that takes long and warns.
for package in ("tensorflow", "keras", "torch"):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)

CASES = "tests.frameworks.horovod_tensorflow_cases"
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("case", case_names(CASES))
def test_case(results, case):
    assert results[case] == [None, None], "\n".join(filter(None, results[case]))
