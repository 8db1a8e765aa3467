"""Ranks that leave in the middle of a round, and come back or come late."""

from tests.engine.transcripts import transcripts

test_rules = transcripts("""
Contributions of two lives are not mixed
    1 CONTRIBUTION total_bytes=128
    unreachable 1                               # nobody waits for it yet
    1 HELLO -> 1 WELCOME
    held 0
    1 CONTRIBUTION total_bytes=128 offset=64 -> 1 RankLostError
    0 CONTRIBUTION total_bytes=128 -> 0 RankLostError rank=1
    held 0

A rank that comes back to a round that is done is told
    1 CONTRIBUTION
    0 CONTRIBUTION -> 0 1 RESULT
    unreachable 1
    1 HELLO -> 1 WELCOME
    1 CONTRIBUTION -> 0 1 RankLostError rank=1

A rank that comes back is told of a failure again
    1 ABORT 0 RankLostError rank=7 -> 1 RankLostError
    unreachable 1
    1 HELLO -> 1 WELCOME
    1 CONTRIBUTION -> 1 RankLostError rank=7

Who waits for a rank that came back without its rounds is told when it goes for good
    each watermark: 0 | 1
    0 CONTRIBUTION total_bytes=128
    1 CONTRIBUTION total_bytes=128 -> 0 1 RESULT # one chunk is done
    unreachable 1
    1 HELLO watermark=$watermark -> 1 WELCOME
    # It lives, and has told the others to leave this reducer: they need not fail.
    0 CONTRIBUTION total_bytes=128 offset=64
    time 5.0
    unreachable 1
    time 5.0+UNREACHABLE_S -> 0 RankLostError rank=1

A rank that comes back may have finished what the others have, too
    0 1 CONTRIBUTION 5 watermark=5 -> 0 1 RESULT
    0 CONTRIBUTION 6 watermark=6
    unreachable 1
    rounds 5 6
    1 HELLO watermark=6 -> 1 WELCOME
    rounds 6

What a rank gave before it came back is dropped
    ranks 3
    0 1 CONTRIBUTION
    unreachable 1                               # rank 2 may still complete it
    1 HELLO world_size=3 -> 1 WELCOME           # it tells the others, or has
    held 1024                                   # of rank 0
    1 CONTRIBUTION -> 0 1 RankLostError rank=1
    held 0

Nobody waits for a rank that gave up before it joined
    new                                         # it was restarted
    0 HELLO watermark=3 -> 0 WELCOME
    0 CONTRIBUTION 3
    1 HELLO watermark=4 -> 1 WELCOME
    1 ABORT 3 ReducerLostError watermark=4 -> 0 1 ReducerLostError

A rank that joins late learns why a round failed
    ranks 2 world_size=3
    0 CONTRIBUTION
    1 CONTRIBUTION op=ReduceOp.MAX -> 0 1 MismatchError
    0 1 CONTRIBUTION 1 watermark=1
    2 HELLO world_size=3 -> 2 WELCOME
    2 CONTRIBUTION -> 2 MismatchError

A round waits for a rank that comes back and had not taken part
    0 CONTRIBUTION total_bytes=128
    unreachable 1                               # before it knew that it had been welcomed
    1 HELLO -> 1 WELCOME
    1 CONTRIBUTION total_bytes=128 -> 0 1 RESULT
    unreachable 1                               # and again: now it has
    1 HELLO -> 1 WELCOME
    0 CONTRIBUTION total_bytes=128 offset=64
    1 CONTRIBUTION total_bytes=128 offset=64 -> 0 1 RankLostError rank=1
""")
