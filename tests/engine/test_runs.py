"""Runs, and processes of one run, that share a job's name."""

from tests.engine.transcripts import transcripts

test_names = transcripts("""
Ranks of two runs do not meet
    new
    0 HELLO run=one process=a -> 0 WELCOME
    1@b HELLO run=two process=b -> b StaleGenerationError says="still has ranks 0 of another run"
    1 HELLO run=one process=c -> 1 WELCOME

A run is what ranks have said of it
    new
    0 HELLO run=one process=a -> 0 WELCOME
    1 HELLO run= process=b -> 1 WELCOME
""")

BEGUN = """
    new
    0 HELLO run=one process="process 0" -> 0 WELCOME
    1 HELLO run=one process="process 1" -> 1 WELCOME
    0 CONTRIBUTION number(0)
    1 CONTRIBUTION number(1)
"""
test_ranks_that_wait_for_each_other = transcripts(
    """
A run does not end an earlier one of which a rank is here
    unreachable 0
    0@new HELLO run=two watermark=1000 -> new StaleGenerationError  # its watermark would do
    rounds number(0) number(1)

A run ends an earlier one that is away as a whole
    unreachable 0 1
    0@new HELLO run=two watermark=1000 -> 1 RankLostError, new WELCOME
    rounds

A process comes back
    unreachable 1
    1@new HELLO run=one process="process 1" -> new WELCOME

A new process does not come back as an old one
    unreachable 1
    1@new HELLO run=one process=another -> 0 RankLostError, new StaleGenerationError

A rank that is given up before the others leave learns that they have left
    lose 1 -> 0 RankLostError
    0 GOODBYE
    jobs
    1 HELLO run=one process="process 1" -> 1 WELCOME
    1 CONTRIBUTION number(7) -> 1 RankLostError text="rank 0 left the job"
    lose 1
    1 HELLO run=one process="process 1" -> 1 WELCOME    # also if it is given up once more
    1 CONTRIBUTION number(7) -> 1 RankLostError text="rank 0 left the job"

A rank that is given up after the others have left learns so
    0 GOODBYE -> 1 RankLostError
    lose 1
    jobs
    1 HELLO run=one process="process 1" -> 1 WELCOME
    1 CONTRIBUTION number(7) -> 1 RankLostError text="rank 0 left the job"
    lose 1
    1 HELLO run=one process="process 1" -> 1 WELCOME
    1 CONTRIBUTION number(7) -> 1 RankLostError text="rank 0 left the job"

Who left an earlier life of a job is waited for
    each process, generation: another 0 | "process 1" 1
    lose 1 -> 0 RankLostError
    0 GOODBYE
    jobs
    1 HELLO run=one process=$process generation=$generation -> 1 WELCOME
    1 CONTRIBUTION number(7) generation=$generation

Who was lost in an earlier life of a job is waited for
    lose 1 -> 0 RankLostError
    lose 0
    jobs
    1 HELLO run=one process="process 1" -> 1 WELCOME
    1 CONTRIBUTION number(7)

A rank that came back after its farewell has not left for good
    1 GOODBYE -> 0 RankLostError
    1 HELLO run=one process="process 1" -> 1 WELCOME
    lose 1
    lose 0
    jobs
    0 HELLO run=one process="process 0" -> 0 WELCOME
    0 CONTRIBUTION number(7)
""",
    BEGUN,
)
