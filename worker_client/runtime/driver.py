"""Moves a session and its transport on: in a thread of its own, or in one that waits for a result.

One thread leads at a time: it alone uses the session and the transport. Usually that is the
driver's own, and so all-reduces go on while their callers compute. But handing every call and
every result from thread to thread takes longer than a small all-reduce itself. So a thread that
waits for one after another leads in its place, and sends what it asks for itself: the core
(`core.h`, and `Core` over it) says who leads, and does what is healthy.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from reducer.errors import LocalProtocolError
from worker_client.protocol.flight import AddStreams, Connect, Finish, MakeResumable, Reset, Send
from worker_client.runtime import _loop
from worker_client.runtime.events import Completed, Connected, Disconnected, Refused
from worker_client.runtime.service_thread import STOP_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from reducer.errors import ReductionError
    from worker_client.protocol.flight import Action
    from worker_client.protocol.operation import Operation, Unfinished
    from worker_client.protocol.session import Session
    from worker_client.runtime.events import Message
    from worker_client.runtime.trace import Trace
    from worker_client.runtime.transport import Transport

LISTEN_S = 0.1  # between two looks at when reducers were heard last
REST_S = 0.001  # the driver's own thread leads again if nobody else waits for as long
AHEAD = 3  # pieces of a call that are filled, and have not ended, before another one is filled

log = logging.getLogger(__name__)


class Driver:
    """Moves all all-reduces of a client on.

    Args:
        session: decides.
        transport: sends, receives and waits.
        trace: shows what becomes of all-reduces, while there is a timeline.
        left: called once, after the farewell, before what has not ended does.
        hand_over: called with calls that are to end by other means.

    Attributes:
        core: takes what is asked for, and moves it on while nothing is unusual.
        session: that.
        settled: set once the session has joined, was refused, or has ended.
    """

    def __init__(
        self,
        session: Session,
        transport: Transport,
        trace: Trace,
        left: Callable[[], None],
        hand_over: Callable[[list[Unfinished]], None],
    ) -> None:
        self.core = transport.core
        self.settled = threading.Event()
        self.session = session
        self._transport = transport
        self._trace = trace
        self._left = left
        self._hand_over = hand_over
        self._settling = True
        self._listened = 0.0  # when it was looked at last who was heard
        self.core.serve(self, trace)
        self._thread = threading.Thread(target=self._run, name="worker-client", daemon=True)
        self._thread.start()

    # -- any thread ---------------------------------------------------------------------------

    @property
    def in_callback(self) -> bool:
        """Whether this thread leads: it is in a callback, or in a signal handler meanwhile."""
        return self.core.leader == threading.get_ident()

    def follow(self, operation: Operation) -> None:
        """Show an all-reduce on the timeline that is about to be submitted."""
        self._trace.follow(operation, self.session.spec)

    def unresolved(self, link: int) -> str:
        """Say why a reducer's name has no address yet; "" if it has. Any thread may ask."""
        return self._transport.unresolved(link)

    def fail(self, error: ReductionError) -> None:
        """End badly what is in progress, and tell the reducers."""
        self.core.failing = error
        self.core.call()

    def stop(self) -> None:
        """Leave the job; what is in progress fails. May be called again.

        Where waiting for the end could last for ever, it returns before: in a callback, and after
        `STOP_S` in the main thread, which a signal handler may have interrupted.
        """
        self.core.close()
        if threading.get_ident() not in {self._thread.ident, self.core.leader}:
            main = threading.current_thread() is threading.main_thread()
            self._thread.join(STOP_S if main else None)
            if self._thread.is_alive():
                log.warning("the client still shuts down after %g s", STOP_S)

    # -- the driver's own thread --------------------------------------------------------------

    def _run(self) -> None:
        core = self.core
        try:
            while not (core.closed or core.failure):
                self._lead_and_rest()
        except BaseException as error:
            log.exception("the client stopped because of an error of its own")
            core.failure = error
            raise
        finally:
            how = "was shut down" if core.failure is None else f"failed: {core.failure!r}"
            self._close(LocalProtocolError(f"the client {how}"))

    def _lead_and_rest(self) -> None:
        core = self.core
        core.lead()
        try:
            self.advance()  # who led before may have left something, and no message of it
            while not (core.closed or core.failure or core.is_wanted(time.monotonic())):
                self.wait(_loop.IDLE_S)
                self.advance()
        finally:
            core.leave()
        if not (core.closed or core.failure):  # others may lead, for as long as they wait
            core.rest(REST_S)

    # -- what the leader does -----------------------------------------------------------------

    def wait(self, timeout_s: float) -> None:
        """Move all-reduces on until there is something to do, or the time is up."""
        self._transport.wait(timeout_s)

    def _start(self) -> None:
        """Start what has been submitted, and send it."""
        core = self.core
        try:
            while not core.start() and (operation := core.first()) is not None:
                if self._is_early(operation):
                    core.put_off()
                    break
                core.drop_first()
                if operation.fill is not None:
                    operation.fill()
                    operation.fill = None
                if actions := self.session.submit(operation, time.monotonic()):
                    self._do(actions)
            self._transport.refill()
        except BaseException as error:  # things may be half done
            core.failure = error
            core.resume(True)
            raise

    def _is_early(self, operation: Operation) -> bool:
        """Whether an all-reduce is yet to be filled, and enough of its call is on the way.

        Filling all of a call at once would take the processor from those whose pieces travel. What
        was submitted later waits as well: it would travel later, too.
        """
        if operation.fill is None:
            return False
        call = operation.call
        begun = [one for one in list(self.core.open) if one.call is call and one.fill is None]
        return len(begun) >= AHEAD  # (a copy: other threads add to what is open)

    def advance(self) -> None:
        """Do everything that is due."""
        session, core = self.session, self.core
        for event in self._transport.events():
            if isinstance(event, Completed):
                self.end(event)
            else:
                self._do(self._take(event))
        self._start()
        if core.failing is not None:
            error, core.failing = core.failing, None
            self._do(session.fail(error))
            self._start()
        now = time.monotonic()
        if now >= session.looks_at or now >= session.flight.earliest:
            self._do(session.tick(now))
            self._start()
        if now - self._listened >= LISTEN_S:
            self._listened = now
            self._transport.listen()
        core.due = self._listened + LISTEN_S
        if core.open or session.active:
            core.due = min(core.due, session.looks_at)
        if self._settling and (session.joined or session.refusal is not None):
            self._settling = False
            self.settled.set()

    def end(self, completed: list[Operation]) -> None:
        """End all-reduces of which all results are here."""
        self._do(self.session.completed(completed, time.monotonic()), given_back=True)

    def _take(self, event: Connected | Disconnected | Refused | Message) -> list[Action]:
        if isinstance(event, Connected):
            round_trip_s = self._transport.round_trip_s(event.link)
            return self.session.connected(event.link, round_trip_s)
        if isinstance(event, Disconnected):
            return self.session.disconnected(event.link, event.reason, event.paused_s)
        if isinstance(event, Refused):
            return self.session.refused(event.link, event.error)
        return self.session.receive(*event, time.monotonic())

    def _do(self, actions: list[Action], *, given_back: bool = False) -> None:
        """Do what the session says.

        Args:
            actions: what to do.
            given_back: the loop reads the buffers of completed all-reduces no more.
        """
        for action in actions:
            if isinstance(action, Finish):
                operation, error = action
                # Who hears of an error may write to the buffer, and other ranks must not see that.
                if (error is not None or not given_back) and operation.sequence >= 0:
                    self._transport.detach(operation)
                try:
                    self.core.open.pop(operation, None)
                    operation.end(error)
                except BaseException:
                    self.core.open[operation] = None  # it ends in `_close`
                    raise
            elif isinstance(action, Send):
                self._transport.send(*action)
            elif isinstance(action, Connect):
                self._transport.connect(action.endpoint)
            elif isinstance(action, MakeResumable):
                self._transport.make_resumable(*action)
            elif isinstance(action, AddStreams):
                self._transport.add_streams(*action)
            elif isinstance(action, Reset):
                self._transport.reset(action.link)
            else:
                self.core.retired = True
                self._hand_over(action.calls)
                for call in action.calls:
                    if call.operation is not None:
                        self.core.open.pop(call.operation, None)

    def _close(self, error: ReductionError) -> None:
        core = self.core
        core.close()
        core.lead()
        try:
            self._do(self.session.close(error))
        except Exception:
            if core.failure is None:
                raise
            log.debug("a client with things half done says no goodbye", exc_info=True)
        finally:
            try:
                self._transport.close()
            finally:
                try:
                    self._left()
                    core.news()  # what has completed is open, and hears that it was too late
                    while core.first() is not None:  # what no session has heard of
                        core.drop_first()
                    for operation in [*core.open, *self.session.flight.all()]:
                        operation.end(error)
                    core.open.clear()
                finally:
                    self.settled.set()  # who waits for that finds that it has ended
                    core.leave()
