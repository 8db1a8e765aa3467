"""Ranks whose connection breaks, what they give up, and what they tell of other reducers."""

from tests.engine.transcripts import transcripts

test_rules = transcripts("""
A rank is lost when it has been away for a while
    time 5.0
    0 CONTRIBUTION
    unreachable 1 1
    time 5.0+UNREACHABLE_S-0.01
    time 5.0+UNREACHABLE_S -> 0 RankLostError rank=1

A rank that comes back in time is told of to nobody
    0 CONTRIBUTION 2 watermark=2
    1 CONTRIBUTION 3 watermark=2
    unreachable 1
    1 HELLO watermark=2 -> 1 WELCOME
    time 3*UNREACHABLE_S
    0 1 CONTRIBUTION 4 watermark=2 -> 0 1 RESULT
    1 CONTRIBUTION 3 watermark=2 -> 1 RankLostError rank=1  # of its earlier life

A lower watermark is another process
    0 1 CONTRIBUTION 5 watermark=5 -> 0 1 RESULT
    0 CONTRIBUTION 6 watermark=6
    unreachable 1
    1@new HELLO -> 0 RankLostError rank=1, new StaleGenerationError # at once: the job is still here

A job that is away as a whole makes way for another one
    0 1 CONTRIBUTION 5 watermark=5 -> 0 1 RESULT
    unreachable 0 1
    1@new HELLO -> new WELCOME
    jobs job=1
    rounds

A reducer that shuts down waits for nobody
    0 CONTRIBUTION
    drain -> 0 1 GOODBYE
    close
    unreachable 1 -> 0 RankLostError rank=1

A rank that is away is lost to the others of its job alone
    0@other HELLO job=other -> other WELCOME
    0 CONTRIBUTION
    lose 1 -> 0 RankLostError rank=1
    jobs job=1 other=1

A peer that was away may come back as somebody else
    each says: job=another -> 0 RankLostError rank=1,
        | generation=1 -> 0 RankLostError rank=1, 0 StaleGenerationError,
    0 CONTRIBUTION
    unreachable 1
    1 HELLO $says 1 WELCOME
    later 2*UNREACHABLE_S                              # its new life goes on
    lose 0 1
    jobs
""")

test_what_was_given_up = transcripts("""
A range is given up now and later
    0 CONTRIBUTION 11
    0 CONTRIBUTION 13
    0 CONTRIBUTION 15
    1 ABORT 11 ReducerLostError nbytes=3 watermark=15
        -> 0 ReducerLostError sequence=11, 0 ReducerLostError sequence=13
    held 1024
    0 CONTRIBUTION 12 -> 0 ReducerLostError
    0 CONTRIBUTION 14 -> 0 ReducerLostError
    1 CONTRIBUTION 15 watermark=15 -> 0 1 RESULT
    0 CONTRIBUTION 10

A range is forgotten when every rank has passed it
    1 ABORT 0 ReducerLostError nbytes=3 watermark=4
    given_up 1
    healthy False
    0 1 CONTRIBUTION 4 watermark=4 -> 0 1 RESULT
    given_up 0
    healthy True
    rounds 4

One that is below the sender's watermark counts while others need it
    1 CONTRIBUTION 7 watermark=7
    0 CONTRIBUTION 3
    1 ABORT 3 ReducerLostError watermark=7 -> 0 1 ReducerLostError
    0 CONTRIBUTION 7 watermark=7 -> 0 1 RESULT
    1 ABORT 5 ReducerLostError watermark=7
    rounds 7
""")

test_reducers_that_are_lost = transcripts("""
A loss is passed on once
    ranks 2 world_size=3 reducers=4
    0 SHARD_MAP reducer=2 epoch=1 -> 1 SHARD_MAP reducer=2 epoch=1
    1 SHARD_MAP reducer=2 epoch=1
    1 SHARD_MAP reducer=2 epoch=0
    1 SHARD_MAP reducer=2 epoch=4 -> 0 SHARD_MAP reducer=2 epoch=4
    1 SHARD_MAP reducer=ALL_REDUCERS epoch=6 -> 0 SHARD_MAP reducer=ALL_REDUCERS epoch=6 sequence=-1

What made a rank begin anew is passed on
    ranks 2 world_size=3 reducers=4
    0 SHARD_MAP reducer=ALL_REDUCERS epoch=4 sequence=7
        -> 1 SHARD_MAP reducer=ALL_REDUCERS epoch=4 sequence=7
    0 SHARD_MAP reducer=ALL_REDUCERS epoch=4 sequence=9
        -> 1 SHARD_MAP reducer=ALL_REDUCERS epoch=4 sequence=9
    0 SHARD_MAP reducer=ALL_REDUCERS epoch=6 -> 1 SHARD_MAP reducer=ALL_REDUCERS epoch=6 sequence=-1
    1 SHARD_MAP reducer=ALL_REDUCERS epoch=4 sequence=7
    1 SHARD_MAP reducer=ALL_REDUCERS epoch=4 sequence=9
    1 SHARD_MAP reducer=ALL_REDUCERS epoch=6
    1 SHARD_MAP reducer=ALL_REDUCERS epoch=5 sequence=11
    2 HELLO world_size=3 reducers=4
        -> 2 WELCOME, 2 SHARD_MAP reducer=ALL_REDUCERS epoch=6 sequence=-1

Who joins late is told of every loss
    ranks 2 world_size=3 reducers=4
    0 SHARD_MAP reducer=2 epoch=1 -> 1 SHARD_MAP reducer=2
    0 SHARD_MAP reducer=3 epoch=0 -> 1 SHARD_MAP reducer=3
    2 HELLO world_size=3 reducers=4
        -> 2 WELCOME, 2 SHARD_MAP reducer=2 epoch=1, 2 SHARD_MAP reducer=3 epoch=0

A reducer that the job does not have cannot be lost
    ranks 2 world_size=3 reducers=4
    0 SHARD_MAP reducer=4 epoch=0 -> 0 RemoteProtocolError
    1 SHARD_MAP reducer=3 epoch=0               # rank 0 is no member any more

An epoch to which no job comes is passed on to nobody
    0 SHARD_MAP reducer=ALL_REDUCERS epoch=(1<<32)-1 -> 0 RemoteProtocolError
    1 SHARD_MAP reducer=0 epoch=(1<<32)-2 -> 1 RemoteProtocolError
""")
