"""Key pairs of CURVE, and Z85: libzmq makes the same of the same bytes."""

import pytest
import zmq
from hypothesis import example, given
from hypothesis import strategies as st
from zmq.utils import z85 as theirs

from reducer.keyfiles import is_key
from reducer.zmtp._keys import make_pair, public_of
from reducer.zmtp.z85 import decode, encode


@given(st.binary(min_size=32, max_size=32))
@example(bytes(32))
@example(b"\xff" * 32)
def test_bytes_and_z85(key):
    text = encode(key)
    assert text.encode() == theirs.encode(key)
    assert decode(text) == key
    assert is_key(text)


@pytest.mark.parametrize("text", ["", "a" * 39, "a" * 41, "a" * 39 + " ", "ä" * 40, "#" * 40])
def test_what_is_no_key(text):
    """The last one has digits of Z85, and is more than four bytes hold."""
    assert not is_key(text)
    with pytest.raises(ValueError, match="40 characters") as refused:
        decode(text)
    assert text == "" or text not in str(refused.value)


def test_pairs_are_new_and_fit_together():
    made = [make_pair() for _ in range(8)]
    assert len({pair.secret for pair in made}) == len(made)
    for pair in made:
        assert zmq.curve_public(pair.secret.encode()).decode() == pair.public
        assert encode(public_of(decode(pair.secret))) == pair.public
    with pytest.raises(ValueError, match="32 bytes"):
        public_of(b"x" * 31)
