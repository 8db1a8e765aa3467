"""When ranks agree on the size of chunks, and on what."""

from __future__ import annotations

import struct

import pytest

from worker_client.tuning import ChunkTuner

KIB = 1 << 10


def test_at_which_calls_the_ranks_agree() -> None:
    tuner = ChunkTuner(4, 0)
    due = [call for call in range(1, 400) if tuner.due()]
    assert due == [3, 6, 12, 24, 48, 96, 192, 288, 384]


@pytest.mark.parametrize(("world_size", "forced"), [(1, 0), (4, 64)])
def test_where_there_is_nothing_to_agree_on(world_size: int, forced: int) -> None:
    tuner = ChunkTuner(world_size, forced)
    assert not any(tuner.due() for _ in range(400))


def test_the_answer_sets_the_size_of_chunks() -> None:
    tuner = ChunkTuner(4, 0)
    assert tuner.chunk_bytes == 64 * KIB
    question = tuner.question(1.2e9, 7.0)
    assert struct.unpack("<q", question.view) == (1_200_000_000,)
    assert question.timeout_s == 7.0
    question.view[:] = struct.pack("<q", 300_000_000)  # another rank is slower
    tuner.answer()
    assert tuner.chunk_bytes == 256 * KIB
    tuner.question(0.0, 7.0).view[:] = struct.pack("<q", 0)  # nobody knows
    tuner.answer()
    assert tuner.chunk_bytes == 64 * KIB


def test_a_forced_size_stays() -> None:
    tuner = ChunkTuner(4, 640)
    assert tuner.chunk_bytes == 640
    tuner.reset()
    assert tuner.chunk_bytes == 640
