"""The examples of a GPT: gradients in 8 bits, and sites that train by themselves."""

import math

import pytest

from tests.frameworks.training import train

pytest.importorskip("torch", reason="needs torch")

SHORT = ("gpt_text.py", "--steps", "40")


@pytest.mark.timeout(600)
def test_a_gpt_trains_in_8_bits_as_in_32(servers):
    stock = train(*SHORT, "--stock")
    ends = [
        train(*SHORT, *more, servers=servers, REDUCTION_WIRE_DTYPE="int8")
        for more in ((), ("--no-feedback",))
    ]
    assert all(len({end.weights for end in ranks}) == 1 for ranks in ends)
    assert len({ranks[0].weights for ranks in (stock, *ends)}) == 3
    for ranks in ends:
        assert ranks[0].loss == pytest.approx(stock[0].loss, rel=0.01)


@pytest.mark.timeout(300)
def test_sites_train_by_themselves_and_end_alike(servers):
    arguments = ("diloco_gpt.py", "--steps", "60", "--every", "20", "--delay", "8", "--seed", "3")
    # Three outer steps of two fragments, one more at the end, and the weights to begin with.
    often = train(*arguments, servers=servers, REDUCTION_WIRE_DTYPE="int8")
    alone = train(*arguments, "--alone", servers=servers)
    for ends in (often, alone):
        assert len({end.weights for end in ends}) == 1
    assert alone[0].bytes_reduced < often[0].bytes_reduced < 3 * alone[0].bytes_reduced
    assert max(often[0].loss, alone[0].loss) < math.log(100) - 1  # as one who knows nothing
