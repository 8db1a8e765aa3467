"""Hooks of pytest: failures that deserve a second look (.ci/run), and skips that are failures."""

import os
import re

import pytest

from tests.waits import TooLateError

# What .ci/run installs, by the words of a skip: with REQUIRE_TOOLS=1 its absence is a failure.
INSTALLED = re.compile(r"make (test|cross|container|kubernetes)-tools|needs (root|torch\b(?! \d))")


def refused(reason):
    """Return why a skip is a failure here, or "" if it is none."""
    if os.environ.get("REQUIRE_TOOLS") == "1" and INSTALLED.search(reason):
        return f"skipped although REQUIRE_TOOLS=1: {reason}"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call):
    """Note which tests failed by a limit of time alone, and refuse skips for want of a tool."""
    report = yield
    if call.excinfo and report.failed:
        report.too_late = call.excinfo.errisinstance(TooLateError)  # reaches the reports of xdist
    elif report.skipped and (why := refused(str(report.longrepr))):
        report.outcome, report.longrepr = "failed", why
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    """Refuse files that are skipped for want of a tool."""
    report = yield
    if report.skipped and (why := refused(str(report.longrepr))):
        report.outcome, report.longrepr = "failed", why
    return report


def pytest_terminal_summary(terminalreporter, config):
    """Leave the tests that failed by a limit of time to `.ci/second_look.py`."""
    found = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    otherwise = {report.nodeid for report in found if not getattr(report, "too_late", False)}
    late = sorted({report.nodeid for report in found} - otherwise)
    if getattr(config, "cache", None) is not None:  # there is none with -p no:cacheprovider
        config.cache.set("reduction/too-late", late)
