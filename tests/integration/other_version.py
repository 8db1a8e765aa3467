"""A program as another version of the protocol has it, at either end of a link.

    python -m tests.integration.other_version VERSION MODULE ARGUMENT ...

The program announces VERSION, ``MAJOR.MINOR``. If that is a later minor version than this one's, it
also says what nobody else knows: a feature, and a name in the body of each message. All constants
are read when modules are imported, so they are set before that.
"""

import dataclasses
import runpy
import sys

from reducer.wire import constants

UNKNOWN_FEATURE = 1 << 40


def become(major, minor):
    """Have this process speak another version."""
    later = major == constants.VERSION_MAJOR and minor > constants.VERSION_MINOR
    constants.VERSION_MAJOR, constants.VERSION_MINOR = major, minor
    if later:
        constants.FEATURES |= UNKNOWN_FEATURE
        constants.COMPILED_FEATURES |= UNKNOWN_FEATURE
        from reducer.wire import messages  # noqa: PLC0415 (it reads them)

        messages.asdict = lambda body: {**dataclasses.asdict(body), "unheard_of": {"a": [1]}}


if __name__ == "__main__":
    _, version, module, *arguments = sys.argv
    become(*map(int, version.split(".")))
    sys.argv[:] = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
