"""What a reducer refuses of a contribution with leaves, whatever its fields say."""

import pytest

from reducer.errors import RemoteProtocolError
from reducer.wire.constants import DType, MessageType, ReduceOp
from reducer.wire.header import Header
from reducer.wire.leaves import check_contribution

SOUND = {"dtype": DType.FLOAT32, "wire_dtype": DType.FLOAT32, "op": ReduceOp.SUM, "window": 8}


def contribution(**fields):
    common = {"sequence": 1, "total_bytes": 4, "nbytes": 4, "rank": 0}
    return Header(MessageType.CONTRIBUTION, **{**common, **SOUND, **fields})


def test_one_that_is_sound_is_taken():
    check_contribution(contribution(), 8, 3, 1024)  # of the leaves 0 to 2: two subtrees
    check_contribution(contribution(rank=2), 4, 3, 1024)
    check_contribution(contribution(window=0), 4, 3, 1024)


@pytest.mark.parametrize(
    ("fields", "payload_bytes"),
    [
        ({"dtype": 0}, 8),
        ({"dtype": 99}, 8),
        ({"op": 0}, 8),
        (
            {"dtype": DType.BLOCK8, "wire_dtype": DType.BLOCK8, "nbytes": 256, "total_bytes": 256},
            512,
        ),
        ({"window": 2}, 8),
        ({"window": (1 << 16) + 1}, 8),
        ({"window": 1 << 63}, 8),
        ({}, 4),
        ({"nbytes": 600, "total_bytes": 600}, 1200),
        ({"window": 0}, 8),
    ],
)
def test_one_that_is_not_is_refused(fields, payload_bytes):
    with pytest.raises(RemoteProtocolError):
        check_contribution(contribution(**fields), payload_bytes, 3, 1024)
