"""Where ranks are among those of their host, when some have been lost and others joined."""

import pytest

pytest.importorskip("torch", reason="needs torch")

from worker_client.horovod.job import HorovodPlace, _find_place

FIRST = [["a", 0, 2], ["a", 1, 2], ["b", 0, 2], ["b", 1, 2]]


def test_launchers_say_where_ranks_are():
    assert _find_place(FIRST, 3, everybody=True) == HorovodPlace(1, 2, 1, 2, True)
    # Where the launcher tells hosts apart that look like one.
    alike = [["a", 0, 1], ["a", 0, 1]]
    assert _find_place(alike, 1, everybody=True) == HorovodPlace(0, 1, 1, 2, True)


def test_a_rank_that_joins_takes_the_lowest_place_that_is_free():
    others = [FIRST[1], FIRST[2], FIRST[3], ["a", None, None], ["a", None, None]]
    places = [_find_place(others, rank, everybody=False) for rank in range(5)]
    assert [place.local_rank for place in places] == [1, 0, 1, 0, 2]
    assert [place.local_size for place in places] == [3, 2, 2, 3, 3]
    assert places[3] == HorovodPlace(0, 3, 1, 2, False)
    assert places[4] == HorovodPlace(2, 3, 0, 1, False)
