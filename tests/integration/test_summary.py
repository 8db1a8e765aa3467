"""What a worker says at its start and its end, unless logging is set up to be silent."""

import json
import logging
import re
from dataclasses import replace

import pytest

from reducer.wire.messages import Straggler
from tests.conftest import local_pool
from tests.integration.calls import ones, process_of
from tests.ranks import environments, ranks
from tests.waits import eventually
from worker_client.client import summary
from worker_client.client.bootstrap import connect
from worker_client.client.summary import Summary, lasting
from worker_client.communicators.communicator import LinkTraffic
from worker_client.protocol._flight import Durations

SCRIPT = """
import logging, sys
import numpy as np
import worker_client
if sys.argv[1:]:
    logging.basicConfig(level=sys.argv[1])
client = worker_client.init()
worker_client.init()
client.all_reduce(np.zeros(1 << 18, np.float32)).wait()
works = [client.all_reduce(np.ones(2), name=f"n{at}") for at in range(4)]
for work in works:
    work.wait()
client.all_reduce(np.zeros(1 << 18, np.float32)).wait()
assert client.calls == 6
assert 0 < client.waited_s < 60
client.shutdown()
client.shutdown()
"""


def run(*arguments, **settings):
    """Run the script at two ranks with one reducer; return what they write to standard error."""
    with local_pool(1) as servers:
        given = environments(2, servers, REDUCTION_JOB="vision", **settings)
        with ranks(given, "-c", SCRIPT, *arguments) as job:
            job.finish()
            return [rank.err.replace(servers[0], "SERVER") for rank in job]


def test_one_line_at_the_start_and_one_at_the_end():
    for rank, said in enumerate(run()):
        begins, ends = said.splitlines()
        who = f"reduction: rank {rank} of 2, job vision"
        assert re.fullmatch(rf"{who}: 1 reducer \(SERVER\), \w+ implementation", begins)
        number, time = r"[\d.]+", r"[\d.]+ (us|ms|s)"
        ended = (
            rf"6 all-reduces, 2.1 MB \(2\.\d MB out, 2\.\d MB in\), {time} \(p99 {time}\), "
            rf"{number} [kMG]B/s, waited {number} s, no reducer lost"
        )
        assert re.fullmatch(f"{who}, ends: {ended}", ends)
        assert len(ends) <= 160


# What a program does about logging: what reaches standard error of the lines at the start and the
# end, and of a warning of each package.
BEGINS, ENDS = "rank 0 of 1, job one: .*", "rank 0 of 1, job one, ends: .*"
BARE = [f"reduction: {BEGINS}", "look out", "take care", f"reduction: {ENDS}"]
LOGGED = ["WARNING:worker_client.any:look out", "WARNING:reducer.any:take care"]
LINES = "worker_client.client.summary:"
PROGRAMS = {
    "pass": BARE,
    "import structlog as s; s.configure(logger_factory=s.stdlib.LoggerFactory())": BARE,
    "import structlog as s; s.stdlib.recreate_defaults()": [],  # to standard output
    "logging.getLogger('other').addHandler(logging.StreamHandler())": BARE,
    "ours.setLevel('INFO')": BARE,
    "logging.basicConfig(level='INFO'); ours.propagate = False": [*BARE[:2], LOGGED[1], BARE[3]],
    "logging.basicConfig()": LOGGED,
    "logging.basicConfig(level='INFO')": [f"INFO:{LINES}{BEGINS}", *LOGGED, f"INFO:{LINES}{ENDS}"],
    "ours.addHandler(logging.NullHandler())": ["take care"],
    "ours.setLevel('ERROR')": ["take care"],
    "logging.disable()": [],
    "logging.lastResort = None; logging.raiseExceptions = False": [BARE[0], BARE[3]],
}
PROGRAM = """
import json, logging, os, sys
import numpy as np
import torch.distributed as dist
from worker_client.client.bootstrap import connect

ours, last = logging.getLogger("worker_client"), logging.lastResort
dist.init_process_group("gloo")
for number, program in enumerate(json.loads(os.environ["PROGRAMS"])):
    for timeline in (False, True):
        exec(program)
        if timeline:
            os.environ["REDUCTION_TIMELINE"] = f"{os.environ['TIMELINES']}/{number}"
        client = connect(job="one")  # hosts a reducer, which has a timeline as well
        if timeline:
            client.start_timeline(f"{os.environ['TIMELINES']}/{number}/again.json")
            further = connect(job="one")
        for name, *words in (ours.name, "look %s", "out"), ("reducer", "take %s", "care"):
            logging.getLogger(f"{name}.any").warning(*words)
        client.shutdown()
        if timeline:
            further.on_end = None
            further.shutdown()
        print("--", file=sys.stderr)
        os.environ.pop("REDUCTION_TIMELINE", None)
        logging.disable(logging.NOTSET)
        logging.lastResort, logging.raiseExceptions, ours.propagate = last, True, True
        ours.setLevel(logging.NOTSET)
        logging.root.setLevel(logging.WARNING)
        for logger in (ours, logging.root):
            for handler in list(logger.handlers):
                logger.removeHandler(handler)
"""


def test_a_timeline_changes_nothing_of_what_is_said(tmp_path):
    given = environments(1, PROGRAMS=json.dumps([*PROGRAMS]), TIMELINES=str(tmp_path))
    with ranks(given, "-c", PROGRAM) as job:
        job.finish()
        (errors,) = (re.sub(rf"INFO:(?!{LINES}).*\n", "", rank.err) for rank in job)
    said = errors.split("--\n")[:-1]
    for (program, expected), *both in zip(PROGRAMS.items(), said[::2], said[1::2], strict=True):
        begins = [line for line in expected if BEGINS in line]
        for found, right in zip(both, (expected, begins + expected), strict=True):
            assert re.fullmatch("".join(f"{line}\n" for line in right), found), (program, found)
    for number, program in enumerate(PROGRAMS):
        heard = (tmp_path / f"{number}" / "again.json").read_text()
        assert ("look out" in heard) == ("ERROR" not in program and "disable" not in program)


def test_that_torchrun_ends_the_others_is_said_once():
    elastic = {"REDUCTION_ON_RANK_LOST": "continue", "TORCHELASTIC_RUN_ID": "none"}
    for said in run("WARNING", LOCAL_WORLD_SIZE="2", **elastic):
        assert "torchrun ends the others of its node" in said
        assert said.count("\n") == 1


def test_what_is_lost_is_counted_once(caplog):
    caplog.set_level(logging.INFO, summary.__name__)
    with local_pool(2) as servers, connect(rank=0, world_size=1, servers=servers) as client:
        client.all_reduce(ones(1)).wait(5)
        client.all_reduce(ones(1), name="one").wait(5)  # these have a job of their own
        for lost, said in enumerate(("no reducer lost", "1 reducer lost")):
            if lost:
                process_of(servers[1]).kill()
                eventually(lambda: client.counters.losses == 2)  # both jobs notice
            assert client.losses == lost
            summary.ends(client.summary(), client.spec)
            assert re.search(rf"ends: 2 all-reduces, 8 bytes .* s, {said}$", caplog.messages[-1])


def test_the_straggler_is_told_by_one_rank():
    straggler = Straggler(rank=3, cause="late", share=0.31, median_s=0.042)
    did = {"calls": 1, "bytes_reduced": 1_200_000, "waited_s": 0.25, "losses": 2, "fallbacks": 2}
    found = Summary(rank=1, world_size=4, present=(1, 2, 3), straggler=straggler, **did)
    assert str(found) == (
        "1 all-reduce, 1.2 MB, waited 0.2 s, reducers lost 2 times, 2 all-reduces by the process "
        f"group, went on without rank 0, {straggler}"
    )
    assert str(replace(found, rank=2)).endswith("went on without rank 0")
    waits = LinkTraffic(waited_for_s={1: 0.26, 3: 8.1, 2: 0.04})
    late = f"ranks waited 8.1 s for rank 3 and 0.3 s for rank 1, {straggler}"
    assert str(replace(found, traffic=waits)).endswith(late)
    assert str(replace(found, rank=2, traffic=waits)) == str(replace(found, rank=2))
    assert "ranks waited" not in str(replace(found, traffic=LinkTraffic(waited_for_s={1: 0.04})))


def test_a_duration_has_two_digits_and_the_unit_that_it_is_rounded_to():
    said = {9.996e-4: "1 ms", 0.0994: "99 ms", 0.9949: "990 ms", 0.9996: "1 s", 71.4: "71 s"}
    assert {seconds: lasting(seconds) for seconds in said} == said
    assert [lasting(each, digits=4) for each in (0, 1.25, 0.0175)] == ["0 us", "1.25 s", "17.5 ms"]


def test_what_was_measured_is_told_in_a_line():
    durations = Durations()
    for took_s in [0.071] * 98 + [1.4] * 2:
        durations.add(took_s)
    did = {"calls": 1200, "bytes_reduced": 102_400_000_000, "waited_s": 12.34, "losses": 0}
    found = Summary(
        *(0, 8, (*range(8),)),
        **did,
        fallbacks=0,
        straggler=None,
        traffic=LinkTraffic(25_600_000_000, 25_700_000_000, 262.0),
        carries=118e6,
        durations=durations,
    )
    assert str(found) == (
        "1200 all-reduces, 102.4 GB (25.6 GB out, 25.7 GB in), 71 ms (p99 1.4 s), "
        "98.1 of 118 MB/s, waited 12.3 s, no reducer lost"
    )
    assert "98.1 MB/s" in str(replace(found, carries=0.0)), "nobody knows"
    assert (found.median_s, found.p99_s) == pytest.approx((0.071, 1.4), rel=1 / 16)
    assert len(f"reduction: rank 0 of 8, job vision, ends: {found}") <= 170


FAILS = """
import numpy as np
import worker_client
client = worker_client.init()
client.all_reduce(np.ones(2 + client.rank)).wait()
"""


def test_the_last_line_of_a_rank_that_fails_is_the_error(pool):
    with ranks(environments(2, pool, REDUCTION_JOB="fails"), "-c", FAILS) as job:
        for rank in job:
            rank.wait(30)
            *_, raised, last = rank.err.splitlines()
            assert raised.startswith("reducer.errors.MismatchError: ")
            assert last.startswith("reduction: rank ")
            assert last.endswith(f"the last one failed: {raised.removeprefix('reducer.errors.')}")
