"""Who moves a session and its transport on: a thread of its own, or whoever waits for a result.

One thread leads at a time: it alone uses the session and the transport. Usually that is the
driver's own, and so all-reduces go on while their callers compute. But handing every call and
every result from thread to thread takes longer than a small all-reduce itself. So a thread that
waits for one after another leads in its place, and sends what it asks for itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from reducer.errors import LocalProtocolError
from worker_client.protocol import _state
from worker_client.protocol.flight import AddStreams, Connect, Finish, Keep, Reset, Send
from worker_client.runtime import service_thread
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

IDLE_S = 0.1  # the leader looks at its clock this often
LISTEN_S = 0.1  # between two looks at when reducers were heard last
REST_S = 0.001  # the driver's own thread leads again if nobody else waits for as long
LONGEST_REST_S = 0.01  # it rests twice as long each time that others have waited, up to this
OFTEN_S = 0.005  # who waits again within this time of the last wait asks to lead
ASKING_S = 0.005  # how long it does
AHEAD = 3  # pieces of a call that are filled, and have not ended, before another one is filled

SHUT_DOWN = "this client was shut down: call worker_client.init() again"

log = logging.getLogger(__name__)


class Driver(_state.DriverState):
    """Moves all all-reduces of a client on.

    Args:
        session: decides.
        transport: sends, receives and waits.
        trace: shows what becomes of all-reduces, while there is a timeline.
        left: called once, after the farewell, before what has not ended does.
        hand_over: called with calls that are to end by other means.

    Attributes:
        session: that.
        closing: nothing may be submitted any more.
        settled: set once the session has joined, was refused, or has ended.
        open: what was submitted and has not ended, besides what is in a callback just now.
    """

    def __init__(
        self,
        session: Session,
        transport: Transport,
        trace: Trace,
        left: Callable[[], None],
        hand_over: Callable[[list[Unfinished]], None],
    ) -> None:
        self.closing = False
        self.settled = threading.Event()
        self.open: dict[Operation, None] = {}
        self.session = session
        self._active = session.calls.active
        self._transport = transport
        self._trace = trace
        self._left = left
        self._hand_over = hand_over
        self._queue: deque[Operation] = deque()
        self._failing: ReductionError | None = None  # what is in progress is to end with it
        self._failure: BaseException | None = None  # of a thread that led for a while
        # Keeps the order of calls; guards `closing`. A signal handler may call `stop` any time.
        self._order = threading.RLock()
        self._lead = threading.RLock()  # whoever has it leads; only that thread can release it
        self._leader = 0  # that thread
        self._wanted_until = 0.0  # another thread asks the driver's own to step aside
        self._settling = True
        self._listened = 0.0  # when it was looked at last who was heard
        self._waited_at = 0.0
        self._stands_in = False  # the driver's own thread leads for one that has left off
        if transport.loop is not None:
            from worker_client.runtime import _caller_lead  # noqa: PLC0415 (there if the loop is)

            lead = _caller_lead.CallerLead(self, transport.loop)
            self.submit, self.wait = lead.submit, lead.wait  # type: ignore[method-assign]
        self._forks = service_thread.forks
        self._thread = threading.Thread(target=self._run, name="worker-client", daemon=True)
        self._thread.start()

    # -- any thread ---------------------------------------------------------------------------

    @property
    def in_callback(self) -> bool:
        """Whether this thread leads: it is in a callback, or in a signal handler meanwhile."""
        return self._leader == threading.get_ident()

    @property
    def busy(self) -> bool:
        """Whether an all-reduce is in progress, besides the one whose callback this is."""
        return bool(self.open)

    def submit(self, operation: Operation) -> None:
        """Start an all-reduce.

        Raises:
            LocalProtocolError: the driver has stopped.
        """
        if self._trace.timeline is not None:
            self._trace.follow(operation, self.session.spec)
        self._enqueue(operation)

    def _enqueue(self, operation: Operation) -> None:
        """Queue an all-reduce for the thread that leads, and wake that."""
        try:
            with self._order:
                if self.closing:
                    raise LocalProtocolError(SHUT_DOWN)
                self.open[operation] = None
                self._queue.append(operation)
                first = len(self._queue) == 1  # now: the leader takes from it at any instant
        except BaseException:  # an interrupt, perhaps: nobody waits for it
            self.open.pop(operation, None)
            raise
        if first:
            self._wake()  # otherwise the leader was woken already

    def wait(self, done: Callable[[], bool], until: float) -> None:
        """Lead until `done`, or the clock says `until`, if that is faster; else return at once.

        Raises:
            LocalProtocolError: this thread leads already, in whose callback or signal handler this
                is: nobody else could bring the end.
        """
        del done, until  # the driver's own thread leads always
        if service_thread.forks == self._forks and not self.session.handed_over:
            self._refuse_to_wait()

    def _refuse_to_wait(self) -> None:
        if self._leader == threading.get_ident():
            raise LocalProtocolError(
                "waiting here would last for ever: this is a callback of an all-reduce, or a "
                "signal handler that interrupted a wait for one"
            )

    def fail(self, error: ReductionError) -> None:
        """End badly what is in progress, and tell the reducers."""
        self._failing = error
        self._wake()

    def stop(self) -> None:
        """Leave the job; what is in progress fails. May be called again.

        Where waiting for the end could last for ever, it returns before: in a callback, and after
        `STOP_S` in the main thread, which a signal handler may have interrupted.
        """
        with self._order:
            first, self.closing = not self.closing, True
            if first:
                self._transport.wake()
                self._transport.resume()
        if threading.get_ident() not in {self._thread.ident, self._leader}:
            main = threading.current_thread() is threading.main_thread()
            self._thread.join(STOP_S if main else None)
            if self._thread.is_alive():
                log.warning("the client still shuts down after %g s", STOP_S)

    # -- who leads ----------------------------------------------------------------------------

    def _ask_for_lead(self, until: float) -> float:
        """Have the driver's own thread step aside, if that is likely to pay.

        Returns:
            Seconds to wait for the lead; 0 if it does not.
        """
        now = time.monotonic()
        again = now < until and now - self._waited_at < OFTEN_S
        if not again or self._leader != self._thread.ident or self.session.active > 1:
            return 0.0
        patience_s = min(ASKING_S, until - now)
        self._wanted_until = now + patience_s
        self._wake()
        return patience_s

    def _wake(self) -> None:
        with self._order:
            if not self.closing:  # and so perhaps closed
                self._transport.wake()

    def _resume(self, *, at_once: bool = True) -> None:
        """Have the driver's own thread lead again, if it rests: at once, or if nobody else does."""
        self._stands_in = at_once
        with self._order:
            if not self.closing:
                self._transport.resume(at_once=at_once)

    def _is_wanted(self, now: float) -> bool:
        """Whether another thread asks to lead, or has left off and may go on."""
        if now < self._wanted_until and self.session.active <= 1:
            return True
        return self._stands_in and not self.open

    def _run(self) -> None:
        try:
            while not (self.closing or self._failure):
                self._lead_and_rest()
        except BaseException as error:
            log.exception("the client stopped because of an error of its own")
            self._failure = error
            raise
        finally:
            how = "was shut down" if self._failure is None else f"failed: {self._failure!r}"
            self._close(LocalProtocolError(f"the client {how}"))

    def _lead_and_rest(self) -> None:
        with self._lead:
            self._leader = threading.get_ident()
            self._advance()  # who led before may have left something, and no message of it
            while not (self.closing or self._failure):
                now = time.monotonic()
                if self._is_wanted(now):
                    break
                self._transport.wait(min(IDLE_S, self._active.earliest - now))
                self._advance()
            self._stands_in = self._stands_in and bool(self.open)
            self._leader = 0
        if not (self.closing or self._failure):  # others may lead, for as long as they wait
            self._transport.rest(REST_S, LONGEST_REST_S, IDLE_S)

    # -- what the leader does -----------------------------------------------------------------

    def _start(self) -> None:
        """Start what has been submitted, and send it."""
        try:
            while self._queue and not self._is_early(self._queue[0]):
                operation = self._queue.popleft()
                if operation.prepare is not None:
                    operation.prepare()
                    operation.prepare = None
                if actions := self.session.submit(operation, time.monotonic()):
                    self._do(actions)
            self._transport.refill()
        except BaseException as error:  # things may be half done
            self._failure = error
            self._resume()
            raise

    def _is_early(self, operation: Operation) -> bool:
        """Whether an all-reduce is yet to be filled, and enough of its call is on the way.

        Filling all of a call at once would take the processor from those whose pieces travel. What
        was submitted later waits as well: it would travel later, too.
        """
        if operation.prepare is None:
            return False
        call = operation.call
        begun = [one for one in list(self.open) if one.call is call and one.prepare is None]
        return len(begun) >= AHEAD  # (a copy: other threads add to what is open)

    def _advance(self) -> None:
        """Do everything that is due."""
        session = self.session
        news = False
        for event in self._transport.events():
            if isinstance(event, Completed):
                self._do(session.completed(event, time.monotonic()), given_back=True)
            else:
                self._do(self._take(event))
                news = True
        if self._queue:
            self._start()
        elif news or self.open:  # else nothing is left to send
            self._transport.refill()
        if self._failing is not None:
            error, self._failing = self._failing, None
            self._do(session.fail(error))
            self._start()
        now = time.monotonic()
        if now >= session.looks_at or now >= self._active.earliest:
            self._do(session.tick(now))
            self._start()
        if now - self._listened >= LISTEN_S:
            self._listened = now
            self._transport.listen()
        if self._settling and (session.joined or session.refusal is not None):
            self._settling = False
            self.settled.set()

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
                    self.open.pop(operation, None)
                    operation.end(error)
                except BaseException:
                    self.open[operation] = None  # it ends in `_close`
                    raise
            elif isinstance(action, Send):
                self._transport.send(*action)
            elif isinstance(action, Connect):
                self._transport.connect(action.endpoint)
            elif isinstance(action, Keep):
                self._transport.keep(*action)
            elif isinstance(action, AddStreams):
                self._transport.add_streams(*action)
            elif isinstance(action, Reset):
                self._transport.reset(action.link)
            else:
                self._hand_over(action.calls)
                for call in action.calls:
                    if call.operation is not None:
                        self.open.pop(call.operation, None)

    def _close(self, error: ReductionError) -> None:
        with self._order:
            self.closing = True
        with self._lead:
            self._leader = threading.get_ident()
            try:
                self._do(self.session.close(error))
            except Exception:
                if self._failure is None:
                    raise
                log.debug("a client with things half done says no goodbye", exc_info=True)
            finally:
                try:
                    self._transport.close()
                finally:
                    try:
                        self._left()
                        for operation in list(self.open):
                            operation.end(error)
                        self.open.clear()
                    finally:
                        self.settled.set()  # who waits for that finds that it has ended
                        self._leader = 0
