from collections.abc import Callable

from worker_client.protocol.operation import Operation
from worker_client.runtime._loop import Loop
from worker_client.runtime.driver import Driver

class CallerLead:
    def __init__(self, driver: Driver, loop: Loop) -> None: ...
    def submit(self, operation: Operation) -> None: ...
    def wait(self, done: Callable[[], bool], until: float) -> None: ...
