"""Runs functions ``case_...`` of a module at every rank, for a test each."""

import traceback

from tests.ranks import write_result


def run_cases(module, *arguments, names="case_", after=lambda: None, stop=False):
    """Call the cases among a module's globals, and write what went wrong with each.

    Args:
        module: its globals.
        arguments: of each case.
        names: how those of the cases begin.
        after: called after each case.
        stop: end this process when one has failed, as the ranks may not be at the same call then.
    """
    went = {}
    for name, case in list(module.items()):
        if name.startswith(names):
            went[name] = ""
            try:
                case(*arguments)
                after()
            except BaseException:
                if stop:
                    raise
                went[name] = traceback.format_exc()
            write_result(went)


def of_all(value):
    """Return what all ranks of torch's process group give, in their order."""
    import torch.distributed as dist  # noqa: PLC0415 (there are cases that do without torch)

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
