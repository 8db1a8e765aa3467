"""Results that ranks hold from a reducer that is lost: claims, questions, answers."""

from tests.engine.transcripts import transcripts

test_rules = transcripts("""
A rank that holds the result is asked and the others get it
    ranks 3
    0 CONTRIBUTION since=2 history=9
    1 RETAINED watermark=1 since=2 history=9
    2 CONTRIBUTION since=2 history=9 -> 1 RETAINED payload=None sequence=0 offset=0 nbytes=64
        rank=0 watermark=0 since=0 history=0
    1 RETAINED result watermark=1 -> 0 2 RESULT payload=RESULT
    held 0
    counters claims=1 supplied=1 results=2
    1 RETAINED result watermark=1
    0 CONTRIBUTION
    counters duplicates=2

What every rank holds is asked of nobody
    0 1 RETAINED
    open
    held 0

An empty result needs no asking
    0 RETAINED total_bytes=0 nbytes=0
    1 CONTRIBUTION bytes=0 -> 1 RESULT payload=bytes()

A claim counts once and takes nothing of a window
    ranks 3
    0 RETAINED
    held 0
    0 RETAINED
    0 CONTRIBUTION
    counters duplicates=2 claims=1
    1 RETAINED
    2 CONTRIBUTION -> 0 RETAINED

Only the one that was asked may answer
    ranks 3
    0 RETAINED result
    0 1 RETAINED
    2 CONTRIBUTION -> 0 RETAINED
    1 RETAINED result
    0 RETAINED result -> 2 RESULT

A holder that goes before it answers fails the round
    each goes: 1 GOODBYE | lose 1
    1 RETAINED
    0 CONTRIBUTION -> 1 RETAINED
    $goes -> 0 RankLostError rank=1
    held 0

A holder that is gone is not asked
    ranks 3
    0 1 RETAINED
    lose 0
    2 CONTRIBUTION -> 1 RETAINED

With every holder gone the round fails
    1 RETAINED
    lose 1
    0 CONTRIBUTION -> 0 RankLostError rank=1

With every holder back anew the round fails
    1 RETAINED
    unreachable 1
    1 HELLO -> 1 WELCOME
    0 CONTRIBUTION -> 0 RankLostError rank=1

A claim that disagrees fails the round
    0 CONTRIBUTION 0
    1 RETAINED 0 total_bytes=128 -> 0 1 MismatchError field=total_bytes
    0 CONTRIBUTION 1 total_bytes=4096
    1 RETAINED 1 total_bytes=4096 nbytes=128 -> 0 1 MismatchError field=chunk_bytes
    0 CONTRIBUTION 2
    1 RETAINED 2 tag=5 -> 0 1 MismatchError field=name
    0 CONTRIBUTION 3
    1 RETAINED 3 epoch=1 -> 0 1 MismatchError field=epoch
    0 CONTRIBUTION 4
    1 RETAINED 4 history=1 -> 0 1 MismatchError field=history
    held 0

An answer of another size fails the round
    1 RETAINED
    0 CONTRIBUTION -> 1 RETAINED
    1 RETAINED bytes=32 nbytes=32 -> 0 1 MismatchError
    held 0

An answer whose header says another size is refused
    1 RETAINED
    0 CONTRIBUTION -> 1 RETAINED
    1 RETAINED bytes=32 -> 1 RemoteProtocolError, 0 RankLostError

A claim of what all ranks have is dropped
    0 1 CONTRIBUTION 1 watermark=1 -> 0 1 RESULT
    0 RETAINED 0 watermark=1
    counters late=1
    rounds 1

A rank that was asked counts as missing
    1 RETAINED
    0 CONTRIBUTION -> 1 RETAINED
    0 STRAGGLERS 0 -> 0 STRAGGLERS missing=(1,)
    0 ABORT 0 ReductionTimeout -> 0 ReductionTimeout missing=(1,), 1 ReductionTimeout

Stragglers are named
    ranks 3
    0 STRAGGLERS 0                              # nobody knows that one
    0 CONTRIBUTION
    0 STRAGGLERS 0 -> 0 STRAGGLERS sequence=0 missing=(1,2)
    2 CONTRIBUTION
    2 STRAGGLERS 0 -> 2 STRAGGLERS missing=(1,)
    1 CONTRIBUTION -> 0 1 2 RESULT
    0 STRAGGLERS 0

A rank that is behind, perhaps with a full window, is no straggler
    ranks 3
    0 CONTRIBUTION total_bytes=128 offset=64
    0 1 CONTRIBUTION total_bytes=128
    0 STRAGGLERS 0 -> 0 STRAGGLERS missing=(2,)
    0 ABORT 0 ReductionTimeout -> 0 1 ReductionTimeout missing=(2,)
""")
