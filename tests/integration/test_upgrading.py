"""What docs/upgrading.md says: minor versions work together, major ones refuse each other.

All are processes. What announces another version is the product itself, or the reference, as
`tests.integration.other_version` starts it.
"""

import re
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from reducer.wire.constants import VERSION_MAJOR, VERSION_MINOR
from tests.commands import free_ports
from tests.ranks import ROOT, SETTINGS, Forked, end, environments, ranks
from tests.waits import eventually

THIS = f"{VERSION_MAJOR}.{VERSION_MINOR}"
OLDEST = f"{VERSION_MAJOR}.0"
LATER = f"{VERSION_MAJOR}.{VERSION_MINOR + 1}"
OTHER = f"{VERSION_MAJOR + 1}.0"
# The reference has no feature at all, as what came before any of them.
REFERENCE = {"REDUCTION_IMPL": "plain"}
READY = "reducer ready on "
RANK = "tests.integration.stepping_rank"


def speaking(version, module, *arguments):
    """The command of a module of Python's that announces a version."""
    return ("-m", "tests.integration.other_version", version, module, *arguments)


class Pool:
    """Reducers of any version, which are replaced at their addresses."""

    def __init__(self, stack, *versions):
        self.servers = [f"127.0.0.1:{port}" for port in free_ports(len(versions))]
        self.processes = {}
        for at, version in enumerate(versions):
            self.start(at, *version)
        stack.callback(lambda: [end(process) for process in self.processes.values()])

    def start(self, at, version, settings=()):
        command = speaking(version, "reducer", "serve", "--bind", f"tcp://{self.servers[at]}")
        environment = {**environments(1)[0], **SETTINGS, **dict(settings)}
        process = self.processes[at] = Forked(command, environment, stdout=PIPE)
        assert process.stdout.readline() == f"{READY}{self.servers[at]}\n"

    def drain(self, at):
        """End a reducer as an upgrade does, by SIGTERM."""
        self.processes[at].terminate()
        assert self.processes[at].wait(20) == 0
        self.processes[at].stdout.close()

    def connections(self, at):
        """How many a reducer has with ranks."""
        found = psutil.Process(self.processes[at].pid).net_connections()
        return sum(one.status == "ESTABLISHED" for one in found)


class Job:
    """Ranks that make steps, and say which reducers they use after each."""

    def __init__(self, processes):
        self._ranks = processes
        self._steps = 0

    def ask(self):
        """Have all ranks make one more step."""
        self._steps += 1
        for rank in self._ranks:
            rank.stdin.write(f"{self._steps}\n")
            rank.stdin.flush()

    def hear(self):
        """The reducers that each rank used, when all sums of the step were right."""
        said = [rank.stdout.readline() for rank in self._ranks]
        assert all(said), self._ranks.report()
        return [line.strip() for line in said]

    def step(self):
        self.ask()
        return self.hear()

    def until_used(self, used):
        """Make steps until all ranks use these reducers."""
        eventually(lambda: self.step() == [used] * len(self._ranks))

    def finish(self):
        for rank in self._ranks:
            rank.stdin.close()
        self._ranks.finish()


@contextmanager
def job(pool, version, **settings):
    """Two ranks of a version."""
    command, given = speaking(version, RANK), environments(2, pool.servers, **settings)
    with ranks(given, *command, talk=True) as processes:
        yield Job(processes)


@pytest.mark.parametrize(
    ("of_reducers", "of_workers", "connections"),
    [
        ((LATER, {}), (THIS, {"REDUCTION_STREAMS": "3"}), 6),
        ((OLDEST, REFERENCE), (LATER, {"REDUCTION_STREAMS": "3"}), 2),
        ((THIS, {}), (OLDEST, REFERENCE), 2),
    ],
    ids=["later reducers", "older reducers", "older workers"],
)
def test_minor_versions_work_together_with_what_both_can_do(of_reducers, of_workers, connections):
    with ExitStack() as stack:
        pool = Pool(stack, of_reducers, of_reducers)
        running = stack.enter_context(job(pool, of_workers[0], **of_workers[1]))
        for _ in range(10):
            running.step()
        eventually(lambda: [pool.connections(at) for at in range(2)] == [connections] * 2)
        running.finish()


def test_reducers_are_replaced_one_by_one_forth_and_back_under_a_running_job():
    with ExitStack() as stack:
        pool = Pool(stack, (THIS,), (THIS,))
        running = stack.enter_context(job(pool, THIS))
        running.until_used("++")
        for version, settings in ((LATER, {}), (OLDEST, REFERENCE)):
            for at, without in ((0, "-+"), (1, "+-")):
                running.ask()  # and while this is under way
                pool.drain(at)
                running.hear()
                running.until_used(without)
                pool.start(at, version, settings)
                running.until_used("++")
        running.finish()


def test_a_reducer_of_another_major_version_is_left_out_of_a_running_job():
    with ExitStack() as stack:
        pool = Pool(stack, (THIS,), (THIS,))
        running = stack.enter_context(job(pool, THIS))
        running.until_used("++")
        pool.drain(0)
        pool.start(0, OTHER, REFERENCE)
        running.until_used("-+")
        for _ in range(10):
            assert running.step() == ["-+", "-+"]
        running.finish()


@pytest.mark.extended_cases("references")
@pytest.mark.parametrize(
    ("of_reducer", "of_worker"),
    [
        ((OTHER, REFERENCE), (THIS, {})),
        ((THIS, {}), (OTHER, REFERENCE)),
        ((OTHER, REFERENCE), (THIS, REFERENCE)),
    ],
    ids=["later reducer", "later worker", "references"],
)
def test_another_major_version_is_refused_in_the_words_of_the_pages(of_reducer, of_worker):
    pages = [Path(ROOT, f"docs/{page}.md").read_text() for page in ("upgrading", "troubleshooting")]
    (advice,) = re.findall(r"which names both: `([^`]+)`", pages[0])
    assert f"\n| `{advice}` |" in pages[1]
    majors = [version.partition(".")[0] for version, _ in (of_reducer, of_worker)]
    with ExitStack() as stack:
        pool = Pool(stack, of_reducer)
        command = speaking(of_worker[0], RANK)
        given = environments(1, pool.servers, **of_worker[1])
        (said,) = stack.enter_context(ranks(given, *command)).outputs()
        assert said == (
            f"VersionError: this side speaks protocol {of_worker[0]}, the peer {majors[0]}.x: "
            f"{advice}\n"
        )
        # Who refuses one serves the others.
        settings = dict(of_reducer[1])
        running = stack.enter_context(job(pool, of_reducer[0], **settings))
        running.step()
        running.finish()
