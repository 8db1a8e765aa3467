"""docs/protocol.md is the specification: its tables and the code say the same."""

import json
import re
from pathlib import Path

import pytest

from reducer import errors
from reducer.conformance import client_cases
from reducer.wire import constants, layout, messages
from reducer.wire.constants import DType, ErrorCode, MessageType, ReduceOp
from reducer.wire.header import LAYOUT, PREFIX, Header
from reducer.wire.states import TRANSITIONS, LinkState, Role

TEXT = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
SECTIONS = {int(part.split(".")[0]): part for part in re.split(r"^## ", TEXT, flags=re.M)[1:]}


def rows(section, columns):
    """Cells of a section's table rows that have this many columns, without the head."""
    found = []
    for line in SECTIONS[section].splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if line.startswith("|") and len(cells) == columns and not set(line) <= set("|- "):
            found.append(cells)
    return found[1:]


def test_header_table():
    table = [(int(at), int(size), name) for at, size, name, _ in rows(2, 4)]
    expected_at = 0
    for at, size, _ in table:
        assert at == expected_at  # no gap, no overlap
        expected_at = at + size
    assert expected_at == constants.HEADER_BYTES == LAYOUT.size

    names = [name for _, _, name in table if name not in {"magic", "version", "(zero)"}]
    assert names == list(Header._fields)
    for at, size, name in table[2:]:
        if name in Header._fields:
            bits = 3 if name == "type" else (1 << (8 * size)) - 1
            values = {name: MessageType(bits) if name == "type" else bits}
            packed = Header(**{"type": MessageType.HELLO, "sequence": 0, **values}).pack()
            assert packed[at : at + size] == bits.to_bytes(size, "little")
    assert PREFIX.size == table[2][0] + table[2][1]  # up to and with the message type


def test_codes():
    assert {name: int(code) for code, name, *_ in rows(3, 4)} == MessageType.__members__
    four = rows(4, 7)
    assert {row[1]: int(row[0]) for row in four} == DType.__members__
    assert {row[1]: int(row[2]) for row in four} == {d.name: d.itemsize for d in DType}
    assert {row[6]: int(row[5]) for row in four if row[5]} == ReduceOp.__members__
    assert {name: int(code) for code, name, _ in rows(7, 3)} == ErrorCode.__members__


def test_fields_that_messages_of_workers_use():
    table = {name: set(filter(None, used.split(", "))) for name, used, _ in rows(2, 3)}
    assert table.pop("RETAINED") == {"as CONTRIBUTION"}
    for kind, used in client_cases.USED.items():
        if kind is not MessageType.RETAINED:
            assert table.pop(kind.name) == used
    assert not any(table.values())


def test_details_of_errors():
    table = {ErrorCode[name]: set(re.findall(r"\w+", text)) for name, text in rows(7, 2)}
    rank = {"rank": 1}
    both = {"field": "op", "other_rank": 2, "expected": 1, "got": 2, **rank}
    for error in (
        errors.VersionError("", expected="1.0", got="2.0"),
        errors.StaleGenerationError("", generation=1, current=2),
        errors.DuplicateRankError("", **rank),
        errors.MismatchError("", **both),
        errors.RankLostError("", **rank),
        errors.ReducerLostError("", reducer="a:1"),
        errors.ReductionTimeout(""),
        errors.CapacityError("", limit="window"),
    ):
        body = json.loads(messages.encode_error(error))
        assert body["detail"].keys() <= table.pop(ErrorCode(body["code"]))
    assert not table


def test_who_may_say_what():
    table = {}
    for state, worker, reducer_ in rows(5, 3):
        here = table[LinkState(state)] = {}
        for role, cell in ((Role.WORKER, worker), (Role.REDUCER, reducer_)):
            here[role] = {}
            for said in filter(None, cell.split(", ")):
                message, _, following = said.partition(" → ")
                here[role][MessageType[message]] = LinkState(following or state)
    assert table == TRANSITIONS


def test_only_the_named_sender_says_a_message():
    senders = {MessageType(int(code)): sender for code, _, sender, _ in rows(3, 4)}
    for state in TRANSITIONS.values():
        for role, allowed in state.items():
            assert all(senders[message] in {role.value, "either"} for message in allowed)


@pytest.mark.parametrize(
    ("section", "sentence", "value"),
    [
        (1, "exactly 96 bytes", constants.HEADER_BYTES == 96),
        (1, "at most 4096 bytes of UTF-8", constants.MAX_BODY_BYTES == 4096),
        (3, "at most 128 ranks", messages.MAX_NAMED_RANKS == 128),
        (3, "-1 for all of them", messages.ALL_REDUCERS == -1),
        (3, "1 to 128 bytes", constants.MAX_JOB_NAME_BYTES == 128),
        (4, "is a block of 252 values", constants.BLOCK_VALUES == 252),
        (5, "least 1024 bytes", constants.MIN_COST == 1024),
        (5, "below watermark + 2097152", constants.MAX_ROUNDS_AHEAD == 2097152),
        (5, "up to 127 all-reduces", constants.PLACES == 128),
        (5, "up to 4 of the largest chunks", constants.SPARE_CHUNKS == 4),
        (8, "With a = 64 or", constants.SHARD_ALIGNMENT == 64),
        (8, "32 KiB for each", layout.MIN_SHARD == 32 << 10),
        (8, "at least 64 KiB", layout.SMALLEST_CHUNK == 64 << 10),
        (8, "at most 256 KiB", layout.LARGEST_CHUNK == 256 << 10),
        (8, "shorter than eight such chunks", layout.MANY_CHUNKS == 8),
        (8, "in 0.7 milliseconds", layout.CHUNK_S == 0.0007),
        (8, "not known and the buffer shorter than 1 MiB", layout.MEASURED_BYTES == 1 << 20),
        (8, "at most 4 MiB", constants.MAX_CHUNK_BYTES == 4 << 20),
    ],
)
def test_numbers_in_prose(section, sentence, value):
    assert sentence in " ".join(SECTIONS[section].split())
    assert value
