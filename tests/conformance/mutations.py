"""Bugs that are planted in the references, and the cases of the kit that notice them."""

from reducer import reference
from reducer.errors import CapacityError

SUMS, EARLY = "Sums are added in the order of ranks", "A result comes when the last rank's"
AGAIN, SIZES = "A contribution that comes again", "Ranks that disagree on the size"


class Backwards(reference.PlainKernels):
    def reduce(self, inputs, out, dtype, op):
        super().reduce(inputs[::-1], out, dtype, op)


class Chain(reference.PlainKernels):
    """It sums nodes of leaves as if they were ranks' contributions."""

    def reduce_leaves(self, inputs, ends, out, dtype, op):
        del ends
        self.reduce(inputs, out, dtype, op)


class Early(reference.Reducer):
    """It sums before the last rank's contribution is in."""

    def _offer(self, member, header, payload):
        super()._offer(member, header, payload)
        round_ = member.job.rounds[header.sequence]
        slot = round_.slots.get(header.offset)
        if slot is not None and len(slot.parts) == member.job.hello.world_size - 1:
            self._complete(member.job, round_, slot)


class Doubled(reference.Reducer):
    """What comes again replaces what has come."""

    def _offer(self, member, header, payload):
        round_ = member.job.rounds.get(header.sequence)
        slot = round_.slots.get(header.offset) if round_ else None
        if slot is not None and member.rank in slot.parts:
            slot.parts[member.rank] = member, payload
        super()._offer(member, header, payload)


class Behind(reference.Job):
    """It blames ranks that are only behind."""

    def missing(self, round_):
        return tuple(filter(round_.waits_for, range(self.hello.world_size)))


def mislabelled(error):
    return reference.messages.encode_error(CapacityError(str(error), limit="rounds"))


REDUCERS = {  # what is put in the place of which name, and the case that notices
    "order": ("PlainKernels", Backwards, SUMS),
    "chain": ("PlainKernels", Chain, "If LEAVES was agreed, leaves are summed"),
    "early": ("Reducer", Early, EARLY),
    "twice": ("Reducer", Doubled, AGAIN),
    "behind": ("Job", Behind, "STRAGGLERS names those that"),
    "mismatch": ("_disagreement", lambda *_: None, SIZES),
    "code": ("encode_error", mislabelled, SIZES),
}
CLIENTS = {  # what is put in the place of which words of the stranger's, and the case that notices
    "history": ('"history": self.history}', '"history": 1}', "history is the checksum"),
    "window": ("if link.flying and", "if False and", "a window of two chunks is kept"),
    "pong": ('if name == b"PING":', 'if name == b"PANG":', "answered with their context"),
    "goodbye": ("link.send(GOODBYE)", "pass", "the last message is GOODBYE"),
    "version": ('.startswith("1.")', '.startswith("")', "another major version: it says nothing"),
}
