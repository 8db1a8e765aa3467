"""What a rank that joins is offered, as text of another process, and who has left the lobby."""

import threading
from types import SimpleNamespace

import pytest

from reducer.errors import ReducerLostError, RemoteProtocolError
from worker_client.communicators.newcomers import MembershipRequest, NewcomerRendezvous, Proposal
from worker_client.protocol.spec import JobSpec

SPEC = JobSpec("job", 0, 0, 2, ("a:1",), 0)
OFFER = {"world_size": 4, "lost": [0, 2], "run": "a run", "generation": 1}


def test_an_offer():
    assert Proposal.parse(OFFER) == Proposal(4, [0, 2], "a run", 1)


@pytest.mark.parametrize(
    "change", [{"lost": [3]}, {"lost": [True]}, {"world_size": "4"}, {"lost": 0}, {"rank": 3}]
)
def test_what_is_no_offer(change):
    """Of four ranks the last is the one that joins, and is not lost."""
    with pytest.raises(RemoteProtocolError, match="no offer"):
        Proposal.parse({**OFFER, **change})


class Silent:
    """A communicator of which no all-reduce ends, nor begins if no reducer answers."""

    session = SimpleNamespace(lost_ranks=())

    def __init__(self, answers=True):
        self.answers, self.asked, self.stopped = answers, threading.Event(), False

    def join(self, _):
        if not self.answers:
            raise ReducerLostError("no answer", reducer="a:1")

    def submit(self, _):
        self.asked.set()

    def stop(self):
        self.stopped = True


def test_a_lobby_to_which_nobody_comes_ends_when_it_is_stopped():
    communicator = Silent()
    lobby = NewcomerRendezvous(lambda _: communicator, SPEC, lambda: Proposal(**OFFER))
    assert communicator.asked.wait(10)
    lobby.stop()
    assert communicator.stopped


def test_who_reaches_no_reducer_leaves_the_lobby():
    communicator = Silent(answers=False)
    with pytest.raises(ReducerLostError):
        MembershipRequest(lambda _: communicator, SPEC, 1.0, 0.0)
    assert communicator.stopped
