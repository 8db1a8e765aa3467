"""The `reducer` command."""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import resource
import signal
import sys
import threading
from contextlib import ExitStack
from enum import StrEnum
from functools import wraps
from pathlib import Path  # noqa: TC003 (typer reads it)
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin

import structlog
import typer

from reducer import __version__
from reducer.commands import plan as plan_command
from reducer.commands import status as status_command
from reducer.commands import terminal
from reducer.commands.keygen import keygen as make_keys
from reducer.config import ReducerConfig, load_with_file
from reducer.errors import ConfigError, ReductionError
from reducer.monitoring.http_port import HttpPort
from reducer.pool import READY
from reducer.runtime.keyring import Keyring
from reducer.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from reducer.engine.rounds import EngineCounters


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


_METAVARS = {"config": "FILE", "keys": "DIR", "timeline": "DIR"}

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


def _option(name: str) -> inspect.Parameter:
    """Return the option of a setting; its help is the first sentence of the field's docstring."""
    field = ReducerConfig.model_fields[name]
    kinds = (field.annotation, *get_args(field.annotation))
    kind: Any = next((kind for kind in (bool, int) if kind in kinds), str)
    words = [word for each in kinds if get_origin(each) is Literal for word in get_args(each)]
    about = " ".join((field.description or "").replace("``", "").split())
    about = re.sub(r"REDUCTION_(\w+)", lambda found: _flag(found[1].lower()), about)
    option = typer.Option(
        None,
        _flag(name),
        metavar=_METAVARS.get(name),
        help=re.split(r"(?<=\.) ", about, maxsplit=1)[0],
        autocompletion=(lambda: words) if words else None,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind | None
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_options(*settings: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Have a command take these settings as options, before its own, and hand them on."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = inspect.signature(command, eval_str=True).parameters.values()
        own = [each for each in parameters if each.kind is each.KEYWORD_ONLY]
        signature = inspect.Signature([*map(_option, settings), *own])
        command.__signature__ = signature  # type: ignore[attr-defined] # what typer reads
        return command

    return decorate


@app.command()
def conform(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Of the reducer.")],
) -> None:
    """Hold a reducer to the specification of the protocol, case by case; exit 1 if one fails."""
    from reducer.conformance import cases, transcript  # noqa: PLC0415 (the others need none of it)

    raise typer.Exit(0 if cases.tell(transcript.conform(address), typer.echo) else 1)


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
@_with_options(*(name for name in ReducerConfig.model_fields if name != "failpoints"))
def serve(
    *,
    log_level: Annotated[LogLevel, typer.Option(help="What goes to standard error.")] = (
        LogLevel.INFO
    ),
    log_format: Annotated[
        LogFormat, typer.Option(help="As text for people, or an object of JSON a line.")
    ] = LogFormat.TEXT,
    stop_at_eof: Annotated[
        bool, typer.Option("--stop-at-eof", help="Stop when standard input ends.")
    ] = False,
    **options: Any,
) -> None:
    """Serve until SIGTERM or Ctrl-C; then finish open rounds and exit 0.

    After SIGTERM it goes on for jobs that have no other reducer, until they have or --drain-timeout
    is over; a second signal ends that.
    """
    _log_to_stderr(log_level, log_format)
    log: structlog.stdlib.BoundLogger = structlog.get_logger("reducer")
    settings = load_with_file(**options)
    _open_many_files()
    log.info("settings", version=__version__, **settings.model_dump())
    stop = threading.Event()
    if stop_at_eof:
        threading.Thread(target=_wait_for_eof, args=[stop], daemon=True).start()
    if settings.impl == "plain":
        _serve_reference(stop, settings, log_format)
        log.info("stopped")
        return
    counters = _serve_until(stop, settings, log_format)
    log.info("stopped", **{name: getattr(counters, name) for name in _COUNTED})


def _serve_reference(stop: threading.Event, settings: ReducerConfig, form: LogFormat) -> None:
    """Have the reference serve until a signal, or another thread, sets `stop`."""
    from reducer import reference  # noqa: PLC0415 (with libzmq, which nothing else here needs)

    settings.check_for_reference()
    structlog.get_logger("reducer").warning(
        "the reference reducer: one job, for loopback and private networks"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    reference.serve(
        settings.bind,
        stop,
        lambda address: _tell_caller(f"{READY}{address}", form),
        io_threads=settings.io_threads,
    )


def _serve_until(stop: threading.Event, settings: ReducerConfig, form: LogFormat) -> EngineCounters:
    """Serve until a signal, the end of a thread, or the caller sets `stop`."""
    grace_s = 0.0
    server: Server | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal grace_s
        del frame
        if stop.is_set():
            if server is not None:
                server.hurry()
        elif number == signal.SIGTERM:
            grace_s = settings.drain_timeout
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):  # first: who finds a port open may send one
        signal.signal(number, on_signal)
    if settings.keys is not None:
        signal.signal(signal.SIGHUP, lambda *_: server.reload_keys() if server else None)
    with ExitStack() as stack:
        port = HttpPort(settings.http, settings.http_connections) if settings.http else None
        if port:
            stack.callback(port.close)
        server = Server(settings, None if settings.keys is None else Keyring.load(settings.keys))
        server.start()
        _tell_caller(f"{READY}{server.address}", form)
        if port:
            stack.enter_context(port.serving(server.observer))
            _tell_caller(f"{HTTP_READY}{port.address}", form)
        while server.alive and not stop.wait(0.2):
            pass
        server.stop(grace_s)
    return server.counters


HTTP_READY = "reducer answers HTTP on "
_COUNTED = (
    *("contributions", "results", "bytes_in", "bytes_out", "rounds_failed"),
    *("refused", "unauthenticated", "over_limit", "ignored", "dropped", "closed"),
)


@app.command()
@_with_options("http", "config")
def health(**options: Any) -> None:
    """Ask the reducer that was started with these settings, and the same variables, how it is.

    Exit code: 0 if all its threads serve, else 1, with what is wrong. A container's health check.
    """
    try:
        # Its HTTP port is all that matters here: --insecure may have been an option of `serve`.
        wrong = status_command.unhealthy(load_with_file(insecure=True, **options).http)
    except ReductionError as error:
        wrong = str(error)
    if wrong:
        typer.echo(f"reducer: {wrong}", err=True)
        raise typer.Exit(1)


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
    console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    last: list[structlog.typing.Processor] = [console]
    foreign = shared
    if form is LogFormat.JSON:
        renderer = structlog.processors.JSONRenderer(default=str)
        last = [structlog.processors.format_exc_info, renderer]
        foreign = [*shared, structlog.stdlib.add_logger_name, structlog.stdlib.ExtraAdder()]
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        foreign_pre_chain=foreign,
    )
    handler = logging.StreamHandler(sys.stderr)
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
