"""What the links allow: the best algbw of a topology, with processors that cost nothing."""

from bench.contenders import Contender
from reducer.planning import network_model

# By wire dtype: how many times as many bytes fp32 has.
_BLOCKS = 4 * 252 / 256
_SMALLER = {"": 1.0, "bf16": 2.0, "fp16": 2.0, "int8": _BLOCKS, "fp8_e4m3": _BLOCKS}
bus_factor = network_model.ring_factor  # busbw / algbw: nccl-tests' definition


def limit(contender: Contender, workers: int, rate: float) -> float:
    """Return the highest algbw in bytes/s if every link carries `rate` bytes/s each way.

    A pool of k reducers takes ``max(S/B, n S/(k B))``. A ring, an MPI of unknown algorithm (which
    no algorithm without further machines can beat) and embedded reducers take ``2(n-1)/n S/B``. k
    reducers beside the workers' own take ``2n(n-1)/(n^2+kn-2k) S/B`` with the best split of the
    bytes (BytePS, OSDI 2020); with k >= n that is a pool. S is what travels: in 8 bits 256 bytes
    for 252 values.
    """
    k = contender.reducers
    rate *= _SMALLER[contender.wire_dtype]
    if workers == 1 and contender.kind != "pool":
        return rate
    if contender.kind in {"pool", "mixed"}:
        topology: network_model.Topology = (
            "pool" if contender.kind == "pool" or k >= workers else "mixed"
        )
    else:
        topology = "embedded"
    owned = network_model.shares(workers, k, topology)
    return 1 / network_model.busiest_card_s(workers, owned, network_model.Network(rate, rate))
