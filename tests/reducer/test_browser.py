"""The page in a real browser, beside real reducers."""

import json
import re
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.browser import PHONE, browser, opened
from tests.commands import serving
from tests.conftest import joined
from tests.ranks import environments, ranks
from tests.reducer.asked import ask
from tests.waits import eventually
from worker_client.client.bootstrap import connect

pytestmark = pytest.mark.usefixtures("no_settings")

SHOWN_S = 3.0  # after a reducer knows it, or was heard for the last time
NAMED_S = 40.0  # until a straggler is, on a busy machine; two of its spans are 10 s
HOSTILE = "<img src=x onerror=alert(1)>"
WORLD_SIZE, SLOW = 4, 2


@contextmanager
def pool():
    """Two reducers with HTTP ports."""
    with serving("--http", 0) as first, serving("--http", 0) as second:
        yield first, second


def of_both(first, second):
    """The address of the first one's page that follows the second, too."""
    return f"http://{first.http}/?reducers={second.http}"


def jobs(reducer):
    return ask(reducer.http, "/status.json").json["jobs"]


@pytest.fixture(scope="module")
def launched():
    with browser() as launched:
        yield launched


def test_it_shows_a_job_and_a_reducer_that_is_lost(launched):
    with pool() as (first, second), opened(launched, of_both(first, second)) as page:
        page.shows("#jobs", "No job is here")
        page.shows("#summary", "2 reducers serve, and wait for jobs.")
        servers = [first.address, second.address]
        with joined(2, servers=servers, job=HOSTILE) as clients:
            works = [client.all_reduce(np.ones(100_000, np.float32)) for client in clients]
            for work in works:
                work.wait(20)
            page.shows("article.job h3", HOSTILE)  # as text
            assert page.page.locator("article.job img").count() == 0
            page.shows("article.job", "2 of 2 ranks · at 2 of 2 reducers")
            assert page.page.locator("article.job .cell").all_inner_texts() == ["0", "1"]
            page.shows("#events li", "all 2 ranks are here")
            host = socket.gethostname()
            page.shows("article.job .figures", "all-reduces/s")
            assert page.page.locator(f"article.job .cell[title^='rank 1 on {host}: ']").count() == 1
            page.shows("#reducers article", f"on\u00a0{host}")
            with connect(servers=servers, rank=1, world_size=2, job="lacks one"):
                page.shows("article.job .finding", "Rank 0 is absent: not here yet, or gone.")
                page.shows("#summary", "Job lacks one lacks ranks.")
                assert page.page.locator(".cell.absent[title='rank 0: absent']").count() == 1
            page.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
            assert page.spare_width() >= 0
            assert page.unanswered == set()
            second.process.kill()
            page.shows("#reducers article", "It does not answer. Last heard ", SHOWN_S)
            page.shows("#summary", "1 of 2 reducers does not answer.", SHOWN_S)
            assert page.spare_width() >= 0
        assert page.errors == []
        assert page.asked == {first.http, second.http}
        assert page.unanswered == {second.http}


@pytest.mark.extended("test_it_shows_a_job_and_a_reducer_that_is_lost")
def test_a_reducer_that_hangs_or_never_answers_and_another_name_of_this_one(launched):
    with pool() as (first, second):
        with opened(launched, of_both(first, second)) as page:
            page.shows("#summary", "2 reducers serve, and wait for jobs.")
            second.process.send_signal(signal.SIGSTOP)
            page.shows("#reducers article", "It does not answer. Last heard ", SHOWN_S)
            second.process.send_signal(signal.SIGCONT)
            page.shows("#summary", "2 reducers serve, and wait for jobs.")
            assert page.errors == []
        second.process.kill()
        second.process.wait()
        with opened(launched, of_both(first, second)) as page:
            page.shows("#reducers article", "It was not heard since this page was opened", SHOWN_S)
            page.shows("#summary", "1 of 2 reducers does not answer. One reducer serves")
        other_name = first.http.replace("127.0.0.1", "localhost")
        with opened(launched, f"http://{first.http}/?reducers={other_name}") as page:
            page.shows("#summary", "One reducer serves, and waits for jobs.")
            eventually(lambda: other_name in page.asked)
            eventually(lambda: page.page.locator("#reducers article").count() == 1)  # it answered
            assert page.errors == []


@pytest.mark.extended("test_it_shows_a_job_and_a_reducer_that_is_lost")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(launched, scheme):
    with (
        serving("--http", 0) as reducer,
        joined(2, servers=reducer.address, job="a job"),
        opened(launched, f"http://{reducer.http}/", scheme=scheme) as page,
    ):
        page.shows("#events li", "all 2 ranks are here")
        worst = page.page.evaluate(Path(__file__).with_name("contrast.js").read_text())
    assert worst["ratio"] >= 4.5, worst


def test_a_red_square_has_its_sentence_though_its_rank_is_not_named(launched):
    """Two ranks have made 6 steps: that all waits were for the same one may be chance."""
    with pool() as (first, second), opened(launched, of_both(first, second)) as page:
        page.shows("#jobs", "No job is here")  # so the page was open before the job began
        with joined(2, servers=[first.address, second.address], job="red") as clients:
            for _ in range(6):
                early = clients[0].all_reduce(np.ones(100_000, np.float32))
                time.sleep(0.5)
                for work in (early, clients[1].all_reduce(np.ones(100_000, np.float32))):
                    work.wait(20)
            page.shows(".finding", "In the last 10 s the others waited for rank 1 ", SHOWN_S)
            page.shows("article.job .finding", "no rank is named as the straggler.")
            page.shows("#summary", "Job red waited for rank 1 for ")
            assert page.page.title().startswith("!")
            assert page.page.locator("article.job .cell.level-3").inner_text() == "1"
            assert jobs(first)[0]["straggler"] is None
        assert page.errors == []


def test_a_strip_shows_what_a_rank_did_in_the_last_ten_minutes(launched):
    cells = {0: "." * 60, 2: "..lL" + 8 * "L" + "s..", 7: 20 * "." + "  aaSS"}
    first_says = [{"rank": rank, "cells": its, "waited_s": 8.0} for rank, its in cells.items()]
    second_says = [{"rank": 0, "cells": 58 * "." + "lS", "waited_s": 4.0}]

    def answer(route):
        real = route.fetch()
        its = first_says if first.http in real.url else second_says
        job = {"name": "told", "generation": 0, "others": 0, "ranks": its}
        route.fulfill(response=real, body=json.dumps({**real.json(), "strips": [job]}))

    with pool() as (first, second), opened(launched, "about:blank") as page:
        page.page.route("**/history.json", answer)
        page.page.goto(of_both(first, second))
        arguments = {"servers": [first.address, second.address], "world_size": 10, "job": "told"}
        with connect(rank=2, **arguments):
            page.shows("article.job .strips .who", "rank 7")
            page.shows("article.job .strips figcaption", "none of the 7 other ranks as long")
            svgs = page.page.locator("article.job svg.strip")
            shows = page.page.locator("svg.strip[aria-label*='late in 1, slow in 1; ']").first
            shows.wait_for()  # what the second one says of rank 0
            host, of_75_s = socket.gethostname(), "waited for 11 % of the time"
            assert [svgs.nth(at).get_attribute("aria-label") for at in range(svgs.count())] == [
                "rank 0, 60 cells of 5 s: late in 1, slow in 1; waited for 3 % of the time",
                f"rank 2 on {host}, 15 cells of 5 s: late in 10, slow in 1; {of_75_s}",
                "rank 7, 26 cells of 5 s: slow in 2, absent in 2; waited for 6 % of the time",
            ]
            drawn = svgs.nth(1).evaluate(
                "(svg) => [...svg.querySelectorAll('rect')].map((one) => "
                "[one.getAttribute('class'), one.x.baseVal.value, one.width.baseVal.value])"
            )
            assert drawn == [
                *(["well", 105, 2], ["late", 107, 1], ["late much", 108, 9], ["slow", 117, 1]),
                ["well", 118, 2],
            ]
            page.page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
            assert page.spare_width() >= 0
        page.page.unroute_all(behavior="ignoreErrors")
        assert page.errors == []


@pytest.mark.extended("test_a_red_square_has_its_sentence_though_its_rank_is_not_named")
def test_a_slow_rank_is_named_with_the_reason(launched):
    with pool() as (first, second), opened(launched, of_both(first, second)) as page:
        settings = {f"LATE_{SLOW}": "0.03", "REDUCTION_JOB": "steps"}
        everyone = environments(WORLD_SIZE, [first.address, second.address], **settings)
        with ranks(everyone, "-m", "tests.lab.straggling_rank"):
            eventually(lambda: any(one["straggler"] for one in jobs(first)), NAMED_S)
            found = f"Rank 2 on {socket.gethostname()} keeps the others waiting"
            page.shows("article.job .finding", found, SHOWN_S)
            sentence = page.page.locator("article.job .finding", has_text=found).inner_text()
            assert "of the time: its contributions come late, " in sentence
            assert page.page.locator("article.job .cell.straggler").inner_text() == str(SLOW)
            strip = page.page.locator("article.job svg.strip").nth(SLOW)
            strip.locator("rect.late").first.wait_for()
            takes = page.page.locator("article.job .figures", has_text="one takes").inner_text()
            found = re.search(r"one takes ([\d.]+) ms, 1 of 100 over ([\d.]+) (ms|s)$", takes)
            p99_s = float(found[2]) * (0.001 if found[3] == "ms" else 1)
            assert 0.001 * float(found[1]) <= p99_s
            assert p99_s > 0.015  # of the eight of a step, one waits for the rank at least
            page.shows("#reducers figcaption", "MB/s")
            second.process.kill()
            eventually(lambda: "has lost reducer 1" in ask(first.http, "/history.json").text)
            page.shows("#events li", "has lost reducer 1", SHOWN_S)
            page.shows("article.job", "4 of 4 ranks · at 1 of 2 reducers")
        assert page.errors == []
        assert page.asked == {first.http, second.http}
