"""Bodies of control messages, and errors on their way over the wire."""

import copy
import json
import pickle

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reducer import errors
from reducer.errors import RemoteProtocolError, VersionError
from reducer.wire.constants import MAX_BODY_BYTES, ErrorCode
from reducer.wire.messages import (
    Hello,
    Loss,
    Stream,
    Welcome,
    decode,
    decode_error,
    encode,
    encode_error,
)

HELLO = Hello(job="digits", world_size=4, reducers=2, reducer_index=1, chunk_bytes=65536)
ERRORS = [
    errors.RemoteProtocolError("a"),
    errors.VersionError("b", expected="1.0", got="2.x"),
    errors.MembershipError("c"),
    errors.StaleGenerationError("d", generation=1, current=2),
    errors.DuplicateRankError("e", rank=3),
    errors.MismatchError("f", field="op", rank=0, other_rank=2, expected="sum", got="mean"),
    errors.RankLostError("g", rank=7),
    errors.ReducerLostError("h", reducer="10.0.0.1:5555"),
    errors.ReductionTimeout("i", missing=(1, 2)),
    errors.CapacityError("j", limit="memory_limit"),
    errors.AuthError("k"),
    errors.ReductionError("l"),
]


@pytest.mark.parametrize(
    "body", [HELLO, Welcome(incarnation="ab12", ticket="5a" * 16), Stream("5a" * 16, 15, "0f" * 32)]
)
def test_round_trip(body):
    assert decode(type(body), encode(body)) == body


@pytest.mark.parametrize(
    "change",
    [
        {"job": ""},
        {"job": "x" * 129},
        {"job": 7},
        {"job": "half a pair: \ud800"},
        {"auth": "ab"},
        {"auth": "x" * 32},
        {"world_size": True},
        {"world_size": 1 << 40},
        {"reducer_index": 2},
        {"reducer_index": -1},
        {"chunk_bytes": 100},
        {"patience_ms": 499},
        {"host_name": "x" * 65},
        {"host_name": "x\n2026-11-28T23:59:59Z [error] disk is full"},
        {"job": "a\x1b[31m"},
        {"run": "a\u202e"},
        {"process": "a\0"},
        {"settings": {"A": "\x1b]0;t\x07"}},
        {"settings": {"A\n": "1"}},
        {"version": "1.0\n"},
        {"features": -1},
        {"version": 1},
    ],
)
def test_values_out_of_bounds_are_refused(change):
    values = json.loads(encode(HELLO)) | change
    with pytest.raises(RemoteProtocolError):
        decode(Hello, json.dumps(values).encode())


@pytest.mark.parametrize("values", [(2, 1, 5), (-1, 1, (1 << 64) - 1), (-1, 1, -2), (-2, 1)])
def test_a_loss_out_of_bounds_is_refused(values):
    with pytest.raises(RemoteProtocolError):
        Loss(*values)


@pytest.mark.parametrize(
    "values", [("", 1), ("5a" * 15, 1), ("5a" * 16, -1), ("5a" * 16, 16), ("5a" * 16, 1, "0f")]
)
def test_a_stream_out_of_bounds_is_refused(values):
    with pytest.raises(RemoteProtocolError):
        Stream(*values)


def test_what_other_versions_say():
    values = json.loads(encode(HELLO))
    later = values | {"token": {"of": "x"}, "lanes": [1, 2]}
    assert decode(Hello, json.dumps(later).encode()) == HELLO
    assert decode(Loss, b'{"reducer":-1,"epoch":1}') == Loss(-1, 1, -1), "without a sequence"
    with pytest.raises(RemoteProtocolError, match="HELLO"):
        decode(Hello, b'{"job": "digits"}')
    values["version"] = "2.3"
    with pytest.raises(VersionError) as refusal:
        decode(Hello, json.dumps(values).encode())
    assert (refusal.value.expected, refusal.value.got) == ("1.0", "2.3")
    assert "install the same major version" in str(refusal.value)


@given(st.binary(max_size=300) | st.text(max_size=100).map(str.encode))
@example(b"[" * 4000)
@example(b" " * 5000)
@example(b'{"code":[]}')
def test_garbage_is_refused(data):
    for read in (lambda: decode(Hello, data), lambda: decode_error(data)):
        with pytest.raises(RemoteProtocolError):
            read()


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_keep_their_attributes(error):
    arrived = decode_error(encode_error(error), sequence=5)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error) | {"sequence": 5}
    for copied in (copy.copy(error), pickle.loads(pickle.dumps(error))):  # noqa: S301 (our own)
        assert (type(copied), str(copied), vars(copied)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("escapes", ["who sends", "who receives"])
def test_text_of_errors_is_one_line_that_does_nothing_to_a_terminal(escapes):
    text, shown = "a\n\x1b[31m \ud800 ä \u202e \\n", "a\\n\\x1b[31m \\ud800 ä \\u202e \\n"
    error = errors.MismatchError(text, field=text, rank=0, other_rank=2, expected=text, got=text)
    body = encode_error(error)
    values = json.loads(body)
    assert values["message"] == values["detail"]["got"] == shown
    if escapes == "who receives":
        detail = values["detail"] | dict.fromkeys(("field", "expected", "got"), text)
        body = json.dumps(values | {"message": text, "detail": detail}).encode()
    arrived = decode_error(body)
    assert {str(arrived), arrived.field, arrived.expected, arrived.got} == {shown}
    assert decode_error(encode_error(arrived)).expected == shown, "a reducer passes it on"


def test_every_code_has_its_error():
    sent = {json.loads(encode_error(error))["code"] for error in ERRORS}
    assert sent == {int(code) for code in ErrorCode}


@pytest.mark.parametrize("text", ["x" * 5000, "\N{SNOWMAN}" * 5000, "\N{PILE OF POO}" * 5000])
def test_the_largest_errors_fit_a_body(text):
    late = encode_error(errors.ReductionTimeout(text, missing=tuple(range(60_000))))
    values = {"rank": 1, "other_rank": 2, "expected": text, "got": text + "!"}
    body = encode_error(errors.MismatchError(text, field=text, **values))
    arrived = decode_error(body)
    passed_on = encode_error(arrived)  # by a reducer
    assert max(len(late), len(body), len(passed_on)) <= MAX_BODY_BYTES
    assert decode_error(late).missing[:2] == (0, 1)
    assert (arrived.rank, arrived.other_rank) == (1, 2)
    assert text.startswith(arrived.expected)
    assert arrived.expected


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=300),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=10,
)
NAMES = ("expected", "got", "generation", "current", "rank", "other_rank", "field", "reducer")


@given(
    st.integers(-1, 13),
    JSON,
    st.dictionaries(st.sampled_from([*NAMES, "missing", "limit"]), JSON | st.integers(0, 9)),
)
def test_what_a_reducer_passes_on_can_be_read_again(code, message, detail):
    body = json.dumps({"code": code, "message": message, "detail": detail}).encode()
    try:
        error = decode_error(body)
    except RemoteProtocolError:
        return
    passed_on = encode_error(error)
    assert len(passed_on) <= MAX_BODY_BYTES
    assert type(decode_error(passed_on)) is type(error)


@pytest.mark.parametrize(
    ("sent", "comes"),
    [
        (errors.LocalProtocolError("shut down"), RemoteProtocolError),
        (errors.DeviceError("no memory", device="cuda:0"), errors.ReductionError),
    ],
)
def test_what_is_local_arrives_as_what_it_is_elsewhere(sent, comes):
    assert type(decode_error(encode_error(sent))) is comes
