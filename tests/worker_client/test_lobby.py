"""What a rank that joins is offered: text that another process has written."""

import pytest

from reducer.errors import RemoteProtocolError
from worker_client.communicators.lobby import Offer

OFFER = {"world_size": 4, "lost": [0, 2], "run": "a run", "generation": 1}


def test_an_offer():
    assert Offer.parse(OFFER) == Offer(4, [0, 2], "a run", 1)


@pytest.mark.parametrize(
    "change", [{"lost": [3]}, {"lost": [True]}, {"world_size": "4"}, {"lost": 0}, {"rank": 3}]
)
def test_what_is_no_offer(change):
    """Of four ranks the last is the one that joins, and is not lost."""
    with pytest.raises(RemoteProtocolError, match="no offer"):
        Offer.parse({**OFFER, **change})
