"""The `reducer` command."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import threading
from contextlib import ExitStack
from enum import StrEnum
from functools import wraps
from pathlib import Path  # noqa: TC003 (typer reads it)
from typing import TYPE_CHECKING, Annotated, Any, get_args

import structlog
import typer

from reducer import __version__
from reducer.commands import plan as plan_command
from reducer.commands import status as status_command
from reducer.commands import terminal
from reducer.commands.keygen import keygen as make_keys
from reducer.config import ImplName, KernelName, load_with_file
from reducer.errors import ConfigError, ReductionError
from reducer.monitoring.http_port import HttpPort
from reducer.pool import READY
from reducer.runtime.keyring import Keyring
from reducer.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


class LogLevel(StrEnum):
    """The least important records that are shown."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """What lines look like."""

    TEXT = "text"
    JSON = "json"


app = typer.Typer(
    help="CPU-only reducers for gradient all-reduce.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _say_version(asked: bool) -> None:
    if asked:
        typer.echo(f"reducer {__version__}")
        raise typer.Exit


@app.callback()
def _commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """CPU-only reducers for gradient all-reduce."""
    del version  # said before any command is looked for


app.command()(status_command.status)
app.command()(status_command.top)
app.command()(plan_command.plan)


def _errors_in_form(serve: Callable[..., None]) -> Callable[..., None]:
    @wraps(serve)
    def command(**options: Any) -> None:
        try:
            serve(**options)
        except ReductionError as error:
            if options["log_format"] is not LogFormat.JSON:
                raise
            structlog.get_logger("reducer").error(str(error))
            raise typer.Exit(_exit_code(error)) from None

    return command


@app.command()
@_errors_in_form
def serve(  # noqa: PLR0917 (options have names on the command line)
    config: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="TOML file of these settings, below the environment."),
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="Where to listen, tcp://HOST:PORT; port 0 takes a free one.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Memory for contributions and results, such as 8GiB.")
    ] = None,
    job_memory_limit: Annotated[
        str | None, typer.Option(help="How much of it one job may take; all by default.")
    ] = None,
    max_jobs: Annotated[int | None, typer.Option(help="Jobs that may be here at once.")] = None,
    max_jobs_per_key: Annotated[
        int | None, typer.Option(help="Of these, jobs of one key, on a pool with keys.")
    ] = None,
    max_rounds: Annotated[
        int | None, typer.Option(help="All-reduces in progress of a job, or of a key's jobs.")
    ] = None,
    max_ranks: Annotated[int | None, typer.Option(help="Ranks that a job may have.")] = None,
    max_chunk_bytes: Annotated[
        str | None, typer.Option(help="Largest chunk, and so message: 256KiB to 4MiB.")
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(help="Connections that may be here at once.")
    ] = None,
    max_connections_per_key: Annotated[
        int | None, typer.Option(help="Of these, a key's members'; half of them by default.")
    ] = None,
    handshake_timeout: Annotated[
        str | None, typer.Option(help="Time for a connection's handshake, such as 5s.")
    ] = None,
    drain_timeout: Annotated[
        str | None, typer.Option(help="After SIGTERM, for jobs that have no other reducer, 8s.")
    ] = None,
    keys: Annotated[
        str | None,  # of an empty one, a Path would be the current directory
        typer.Option(metavar="DIR", help="Directory of the pool's keys, as `keygen` makes it."),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen beyond this machine without authentication.")
    ] = False,
    kernel: Annotated[
        str | None,
        typer.Option(
            help="avx512, avx2, neon, generic or numpy; the CPU's best by default.",
            autocompletion=lambda: get_args(KernelName),
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads that serve, each at a port of its own from PORT on.")
    ] = None,
    io_threads: Annotated[
        int | None, typer.Option(help="libzmq's threads that move bytes, per serving thread.")
    ] = None,
    cpus: Annotated[str | None, typer.Option(help="CPUs to run on, such as 0-3,8.")] = None,
    impl: Annotated[
        str | None,
        typer.Option(
            help="compiled or plain; compiled if it can run, by default.",
            autocompletion=lambda: get_args(ImplName),
        ),
    ] = None,
    http: Annotated[
        str | None, typer.Option(help="Where probes, metrics and status are, HOST:PORT or PORT.")
    ] = None,
    timeline: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Where to write a timeline, which Perfetto opens."),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="What goes to standard error.")] = (
        LogLevel.INFO
    ),
    log_format: Annotated[
        LogFormat, typer.Option(help="As text for people, or an object of JSON a line.")
    ] = LogFormat.TEXT,
    stop_at_eof: Annotated[
        bool, typer.Option("--stop-at-eof", help="Stop when standard input ends.")
    ] = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish open rounds and exit 0.

    After SIGTERM it goes on for jobs that have no other reducer, until they have or --drain-timeout
    is over; a second signal ends that.
    """
    _log_to_stderr(log_level, log_format)
    log: structlog.stdlib.BoundLogger = structlog.get_logger("reducer")
    settings = load_with_file(
        config=config,
        bind=bind,
        memory_limit=memory_limit,
        job_memory_limit=job_memory_limit,
        max_jobs=max_jobs,
        max_jobs_per_key=max_jobs_per_key,
        max_rounds=max_rounds,
        max_ranks=max_ranks,
        max_chunk_bytes=max_chunk_bytes,
        max_connections=max_connections,
        max_connections_per_key=max_connections_per_key,
        handshake_timeout=handshake_timeout,
        drain_timeout=drain_timeout,
        keys=keys,
        insecure=insecure or None,
        kernel=kernel,
        threads=threads,
        io_threads=io_threads,
        cpus=cpus,
        impl=impl,
        http=http,
        timeline=timeline,
    )
    _open_many_files()
    log.info("settings", version=__version__, **settings.model_dump())
    stop = threading.Event()

    grace_s = 0.0

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal grace_s
        del frame
        if stop.is_set():
            server.hurry()
        elif number == signal.SIGTERM:
            grace_s = settings.drain_timeout
        stop.set()

    with ExitStack() as stack:
        port = HttpPort(settings.http, settings.http_connections) if settings.http else None
        if port:
            stack.callback(port.close)
        server = Server(settings, None if settings.keys is None else Keyring.load(settings.keys))
        signal.signal(signal.SIGTERM, on_signal)
        signal.signal(signal.SIGINT, on_signal)
        if settings.keys is not None:
            signal.signal(signal.SIGHUP, lambda *_: server.reload_keys())
        server.start()
        _tell_caller(f"{READY}{server.address}", log_format)
        if port:
            stack.enter_context(port.serving(server.observer))
            _tell_caller(f"{HTTP_READY}{port.address}", log_format)
        if stop_at_eof:
            threading.Thread(target=_wait_for_eof, args=[stop], daemon=True).start()
        while server.alive and not stop.wait(0.2):
            pass
        server.stop(grace_s)
    log.info("stopped", **{name: getattr(server.counters, name) for name in _COUNTED})


HTTP_READY = "reducer answers HTTP on "
_COUNTED = (
    *("contributions", "results", "bytes_in", "bytes_out", "rounds_failed"),
    *("refused", "unauthenticated", "over_limit", "ignored", "dropped", "closed"),
)


@app.command()
def keygen(
    directory: Annotated[Path, typer.Argument(help="Where; made if need be, for you alone.")],
    job: Annotated[
        list[str] | None, typer.Option(help="A job to make keys for; may be repeated.")
    ] = None,
    rotate: Annotated[
        bool, typer.Option("--rotate", help="New keys for jobs that have some, beside the old.")
    ] = False,
) -> None:
    """Make keys for a pool (DIRECTORY/pool) and its jobs (DIRECTORY/jobs/JOB), or add jobs."""
    for made in make_keys(directory, job or ["default"], rotate=rotate):
        print(made)  # noqa: T201 (what a script goes on with)


def _open_many_files() -> None:
    """Use what the system allows: each connection is a file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _wait_for_eof(stop: threading.Event) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    stop.set()


def _tell_caller(line: str, form: LogFormat) -> None:
    """Write a line that a caller may wait for to standard output, in the form of the log."""
    if form is LogFormat.JSON:
        stamp = structlog.processors.TimeStamper(fmt="iso")
        line = json.dumps(stamp(None, "info", {"event": line, "level": "info"}))
    print(line, flush=True)  # noqa: T201


def _log_to_stderr(level: LogLevel, form: LogFormat) -> None:
    """Send structlog's and the standard library's records to standard error, in one form."""
    shared: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    handler = logging.StreamHandler(sys.stderr)
    if form is LogFormat.JSON:
        formatter = structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(default=str),
            ],
            foreign_pre_chain=[
                *shared,
                structlog.stdlib.add_logger_name,
                structlog.stdlib.ExtraAdder(),
            ],
        )
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        formatter = structlog.stdlib.ProcessorFormatter(
            processor=renderer, foreign_pre_chain=shared
        )
    handler.setFormatter(formatter)
    handler.setLevel(level.name)  # what is kept of the past may need more records
    logging.basicConfig(level=level.name, handlers=[handler])
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def main() -> None:
    """Run the command; our own errors become sentences, and exit code 2 if a setting is wrong."""
    try:
        app()
    except ReductionError as error:
        for line in f"reducer: {error}".splitlines():
            text = terminal.wrapped(line, 4, terminal.columns(sys.stderr))
            typer.secho(text, err=True, fg=typer.colors.RED)
        sys.exit(_exit_code(error))


def _exit_code(error: ReductionError) -> int:
    return 2 if isinstance(error, ConfigError) else 1
