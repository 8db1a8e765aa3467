"""What `bench.hivemind` makes of what its peers tell; hivemind is not needed."""

from bench import hivemind


class Peers:
    """Two peers that tell what was prepared, and hear when they may go on."""

    def __init__(self, *said):
        self.said, self.heard = list(said), []

    def hear_all(self, _):
        return self.said.pop(0)

    def tell(self, line):
        self.heard.append(line)


def test_an_average_takes_from_the_first_peer_to_the_last_and_matchmaking_stands_apart(monkeypatch):
    used = iter([0.0, 0.0, 1.0, 2.0, 4.0, 7.0])  # of two peers, at three times
    monkeypatch.setattr(hivemind, "used_s", lambda _: next(used))
    peers = Peers(
        [{}, {}],
        [{"begun": 10.0, "ended": 11.0}, {"begun": 10.5, "ended": 12.0}],
        [{"begun": 21.0, "ended": 24.0}, {"begun": 20.0, "ended": 23.0}],
        [{"error": 0.01}, {"error": 0.02}],
    )
    found = hivemind.turn(peers, "NoCompression", [1, 2], 10**9)
    assert found == {"ms": 4000, "matched_ms": 6000, "cpu": 4.0, "error": 0.02}
    assert peers.heard == ["NoCompression", "go on", "go on", "go on"]


def test_a_row_is_a_median_beside_what_links_allow(capsys):
    turns = {
        "embedded": [{"ms": ms, "cpu": 1.0} for ms in (30.0, 10.0, 20.0)],
        "NoCompression": [{"ms": 40.0, "cpu": 2.0, "matched_ms": 90.0, "error": 1e-8}],
    }
    ours, theirs = hivemind.table(turns, [10.0, 10.0])
    assert ours == {
        "way": "embedded",
        "ms": 20.0,
        "cpu": 1.0,
        "lowest": 10.0,
        "highest": 30.0,
        "limit": 0.5,
    }
    assert (theirs["limit"], theirs["matched_ms"]) == (0.25, 90.0)
    assert len(capsys.readouterr().out.splitlines()) == 3
