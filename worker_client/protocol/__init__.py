"""What a worker says and when, and what it has in flight: no I/O, no clock."""

try:
    from worker_client.protocol import _flight  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"the compiled modules of the client cannot be loaded ({error}): install a wheel for this "
        "machine, or a C compiler, Python's headers and libsodium's, and reinstall from the "
        "sources. Where nothing can be compiled, worker_client.reference.Client makes blocking "
        "all-reduces"
    ) from error
