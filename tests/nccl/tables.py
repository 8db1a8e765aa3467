"""The plug-in's tables as NCCL reads them, version by version, for programs that do as NCCL does.

Written from NCCL's headers, apart from the library's own declarations.
"""

import ctypes
from ctypes import CFUNCTYPE, byref, c_char_p, c_float, c_int, c_int16, c_size_t, c_uint64
from ctypes import c_void_p as pointer
from importlib.util import find_spec
from pathlib import Path

VERSIONS = (8, 9, 10, 11, 12)
SUCCESS, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT, REMOTE_ERROR = 0, 2, 3, 4, 6
HANDLE_BYTES, HOST, CUDA = 128, 1, 2
LOG = CFUNCTYPE(None, c_int, ctypes.c_ulong, c_char_p, c_int, c_char_p, c_char_p)


class PluginError(Exception):
    """What a function returned, where that was not success."""


def path() -> Path:
    """Return where the library is."""
    package = find_spec("worker_client.nccl").submodule_search_locations[0]
    return Path(package, "libnccl-net-reduction.so")


def functions(*signatures):
    return [(name, CFUNCTYPE(c_int, *types)) for name, *types in signatures]


def properties(version):
    """Return the structure of a device's properties."""
    merged = type(
        "Merged",
        (ctypes.Structure,),
        {"_fields_": [("count", c_int), ("devices", c_int * (8 if version > 11 else 4))]},
    )
    fields = [("name", c_char_p), ("pci_path", c_char_p), ("guid", c_uint64), ("pointers", c_int)]
    fields += [("registration_is_global", c_int)] + [("force_flush", c_int)] * (version > 8)
    fields += [("speed", c_int), ("port", c_int), ("latency", c_float), ("max_connections", c_int)]
    fields += [("max_receives", c_int), ("offload", c_int), ("offload_version", c_int)]
    if version > 8:
        fields += [("merged", merged), ("max_message", c_size_t), ("max_collective", c_size_t)]
    fields += [("max_requests_of_one", c_int)] * (version > 10)
    fields += [("rail", c_int16), ("plane", c_int16)] * (version > 11)
    return type(f"Properties{version}", (ctypes.Structure,), {"_fields_": fields})


def net(version):
    """Return the structure of the point-to-point table."""
    context, profiled = [pointer] * (version > 10), [pointer] * (version > 9)
    init = {10: (LOG, pointer), 11: (pointer, c_uint64, pointer, LOG, pointer)}
    count = c_int if version == 8 else c_size_t
    named = functions(
        ("init", *init.get(min(version, 11), (LOG,))),
        ("devices", pointer),
        ("properties", c_int, pointer),
        ("listen", *context, c_int, pointer, pointer),
        ("connect", *context, c_int, *[pointer] * (version == 10), pointer, pointer, pointer),
        ("accept", pointer, pointer, pointer),
        ("register_memory", pointer, pointer, count, c_int, pointer),
        ("register_dma_buffer",),
        ("deregister_memory", pointer, pointer),
        ("send", pointer, pointer, count, c_int, pointer, *profiled, pointer),
        ("receive", pointer, c_int, pointer, pointer, pointer, pointer, *profiled, pointer),
        ("flush",),
        ("test", pointer, pointer, pointer),
        ("close_sender", pointer),
        ("close_receiver", pointer),
        ("close_listener", pointer),
        ("get_device_memory",),
        ("receive_consumed",),
        *[("merge_devices",)] * (version > 8),
        *[("finalize", pointer), ("set_attributes",)] * (version > 10),
    )
    return type(f"Net{version}", (ctypes.Structure,), {"_fields_": [("name", c_char_p), *named]})


class Net:
    """The point-to-point network of one version of the tables, as NCCL's proxy uses it."""

    def __init__(self, version: int, library: Path | None = None) -> None:
        self.version = version
        self.said: list[str] = []
        self._log = LOG(lambda *line: self.said.append(line[-1].decode()))
        self._library = ctypes.CDLL(str(library or path()))
        self.table = net(version).in_dll(self._library, f"ncclNetPlugin_v{version}")
        self._context = pointer()
        if version > 10:
            arguments = (byref(self._context), 1, None, self._log, None)
        else:
            arguments = (self._log, None)[: 1 + (version == 10)]
        self.check(self.table.init(*arguments))
        self._first = (self._context,) * (version > 10)

    def check(self, result: int) -> None:
        if result != SUCCESS:
            raise PluginError(result, self.said[-1:])

    def devices(self) -> int:
        count = c_int(-1)
        self.check(self.table.devices(byref(count)))
        return count.value

    def properties(self, device: int):
        """Return them, and look that no byte behind them was written."""
        kind = properties(self.version)
        memory = ctypes.create_string_buffer(
            b"\xa5" * (ctypes.sizeof(kind) + 64), ctypes.sizeof(kind) + 64
        )
        self.check(self.table.properties(device, memory))
        assert memory.raw[ctypes.sizeof(kind) :] == b"\xa5" * 64
        return kind.from_buffer_copy(memory)

    def listen(self, device: int = 0):
        handle, listener = ctypes.create_string_buffer(HANDLE_BYTES), pointer()
        self.check(self.table.listen(*self._first, device, handle, byref(listener)))
        return handle, listener

    def connect(self, handle):
        """Return a sender, or None: not yet."""
        sender, config = pointer(), (None,) * (self.version == 10)
        result = self.table.connect(
            *self._first, 0, *config, handle, byref(sender), byref(pointer())
        )
        self.check(result)
        return sender if sender.value else None

    def accept(self, listener):
        """Return a receiver, or None: not yet."""
        receiver = pointer()
        self.check(self.table.accept(listener, byref(receiver), byref(pointer())))
        return receiver if receiver.value else None

    def send(self, sender, data, tag: int = 0):
        """Return a request, or None: not now."""
        request, profiled = pointer(), (None,) * (self.version > 9)
        address = data.ctypes.data if data.size else None
        result = self.table.send(sender, address, data.nbytes, tag, None, *profiled, byref(request))
        self.check(result)
        return request.value

    def receive(self, receiver, data, tag: int = 0):
        """Return a request, or None: not now."""
        request, profiled = pointer(), (None,) * (self.version > 9)
        count = c_int if self.version == 8 else c_size_t
        result = self.table.receive(
            receiver,
            1,
            byref(pointer(data.ctypes.data if data.size else None)),
            byref(count(data.nbytes)),
            byref(c_int(tag)),
            byref(pointer()),
            *profiled,
            byref(request),
        )
        self.check(result)
        return request.value

    def test(self, request) -> int | None:
        """Return how many bytes a request moved, or None: it has not ended."""
        done, nbytes = c_int(-1), c_int(-1)
        self.check(self.table.test(request, byref(done), byref(nbytes)))
        return nbytes.value if done.value else None
