"""A process that has imported torch and forks ranks; `tests.ranks` starts it and asks it.

It is a program of its own, ``python -m tests.fork_server DESCRIPTOR``: nothing of pytest's process
is in it, and it has one thread. The socket of that descriptor carries requests, as JSON: a command
line with an environment, together with standard input, output and error, is answered with the
process number of a new rank; the process number of a rank with its exit code, null while it runs.
Each has a number of its own, which the answer repeats. What a rank has started is killed when its
end is noticed. When the socket is closed, because pytest has ended, all ranks are killed.

The fork server of `multiprocessing` ends its processes with `os._exit`: no function of `atexit` is
called, with which a worker says goodbye to its reducers, and Ctrl-C ends a process with exit code 1
instead of SIGINT. Here a rank returns from the server's loop, runs its script, and reaches the end
of the program as any script does.

What a rank has in common with the others, and would not have in an interpreter of its own: the seed
of hashes (an order that depends on it is noticed by `fresh` ranks alone), what `PYTHON*` and
`OMP_NUM_THREADS` say of the interpreter, and the modules that are imported already, of others: each
rank imports `reducer` and `worker_client` itself. At its end, what it has made itself is finalized
as ever; the modules that were imported before the fork, and the destructors of their C++ libraries,
would take half a second of every rank, and `fresh` ranks alone see to them.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

PRELOAD = (
    *("numpy.random", "pytest", "torch.distributed", "torch._dynamo"),
    *("prometheus_client", "pydantic_settings", "structlog", "typer", "zmq.asyncio"),
)
ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


def preload():
    """Import what takes ranks long to import, as far as it is installed."""
    others = {}
    atexit.register(spare, others)  # what is registered first is called last
    for name in PRELOAD:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    others.update(sys.modules)
    for name in ("__main__", "builtins", "sys"):
        del others[name]
    gc.freeze()  # the end of every rank would look for garbage among all that, for a second
    with contextlib.suppress(AttributeError):  # it is of glibc
        libc = ctypes.CDLL(None)
        libc.on_exit(libc["_exit"], None)  # with the exit code; the latest comes first


def spare(modules):
    """Keep modules from being finalized: this interpreter no longer knows them, nor frees them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(modules))
    for name, module in modules.items():
        if sys.modules.get(name) is module:
            del sys.modules[name]


def serve(control):
    """Answer requests; return in every rank, with its request and its standard streams."""
    codes = {}  # how each rank has ended
    while True:
        message, streams, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not message:
            for pid in (pid for pid, code in codes.items() if code is None):
                os.killpg(pid, signal.SIGKILL)
            sys.exit()
        number, request = json.loads(message)
        if isinstance(request, int):
            if codes[request] is None and os.waitid(os.P_PID, request, ENDED):
                os.killpg(request, signal.SIGKILL)  # what it has started, while that has its number
                codes[request] = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
            answer = codes[request]
        else:
            answer = os.fork()
            # A group of the rank's own (0 is oneself), before either side goes on.
            os.setpgid(answer, answer)
            if answer == 0:
                control.close()
                return request, streams
            codes[answer] = None
            for stream in streams:
                os.close(stream)
        control.send(json.dumps([number, answer]).encode())


def settle(request, streams):
    """Make this fork what a new interpreter would be: streams, environment, signals, dice."""
    for standard, stream in enumerate(streams):
        os.dup2(stream, standard)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.chdir(request["folder"])
    # PYTHONPATH is the rank's, and no longer the server's.
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    now = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, now), *(path for path in sys.path[1:] if path not in before)]
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    sys.modules["numpy"].random.seed()  # Python's own dice do so after a fork


def run(what, *arguments):
    """Run a command line of `python` as the main module, and return what it has defined."""
    name, *rest = arguments if what in {"-m", "-c"} else (what, *arguments)
    places = {"-m": str(Path.cwd()), "-c": ""}
    sys.path.insert(0, places.get(what, str(Path(what).resolve().parent)))
    sys.argv[:] = ["-c" if what == "-c" else name, *rest]
    if what == "-m":
        return runpy.run_module(name, run_name="__main__", alter_sys=True)
    if what == "-c":
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(name, "<string>", "exec"), vars(main))  # noqa: S102 (what `python -c` is)
        return vars(main)
    return runpy.run_path(what, run_name="__main__")


if __name__ == "__main__":
    preload()
    request, streams = serve(socket.socket(fileno=int(sys.argv[1])))
    settle(request, streams)
    # What a script has defined lasts until the interpreter is finalized, as it would in its own.
    defined = run(*request["command"])
