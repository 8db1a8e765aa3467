"""Long cables: a program in C in the place of the bridge, which holds every frame for a while.

The kernel's own way, ``netem``, is missing from many kernels. The program is compiled at each start
of a lab that needs it, a third of a second, so that there is nothing to install or to keep.
"""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.network import LabUnavailable

SOURCE = Path(__file__).with_suffix(".c")
COMPILE_S = 60.0


@contextmanager
def cables(
    namespace: str, ports: Sequence[str], delay_ms: float, loss_percent: float
) -> Iterator[None]:
    """Join the ports of a namespace until the end of the block, or of this process."""
    with tempfile.TemporaryDirectory(prefix="lab-") as folder:
        program = str(Path(folder, "delay"))
        _compile(program)
        numbers = [str(round(delay_ms * 1e3)), str(round(loss_percent * 1e4))]
        with subprocess.Popen(
            ["ip", "netns", "exec", namespace, program, *numbers, *ports],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout
            assert process.stderr
            try:
                if process.stdout.readline() != "ready\n":
                    said = process.stderr.read().strip()
                    raise LabUnavailable(f"frames cannot be delayed: {said}")
                yield
            finally:
                process.kill()


def _compile(program: str) -> None:
    compiler = os.environ.get("CC", "cc")
    try:
        subprocess.run(
            [compiler, "-O2", "-o", program, str(SOURCE)],
            check=True,
            capture_output=True,
            text=True,
            timeout=COMPILE_S,
        )
    except FileNotFoundError as error:
        raise LabUnavailable(
            f"long round trips need a C compiler, and `{compiler}` is missing: install gcc"
        ) from error
    except subprocess.CalledProcessError as error:
        raise LabUnavailable(f"{SOURCE.name} cannot be compiled: {error.stderr.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise LabUnavailable(f"`{compiler}` did not end within {COMPILE_S:g} s") from error
