"""Two nodes of four ranks: what their network cards carry, and how long it takes."""

import pytest

from bench import hierarchy

pytest.importorskip("torch", reason="needs torch")


@pytest.mark.timeout(400)
def test_a_nodes_card_carries_each_buffer_once(namespaces):
    flat, hierarchical = hierarchy.measure(
        nodes=2, local=4, reducers=2, mbit=25, nbytes=4 << 20, rounds=2
    )
    assert flat.wrong == hierarchical.wrong == 0
    assert 1.0 <= hierarchical.sent <= 1.05
    assert 1.0 <= hierarchical.received <= 1.05
    assert flat.sent > 4.0
    assert flat.seconds >= 3.0 * hierarchical.seconds
