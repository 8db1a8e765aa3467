"""What one rounding to blocks of 8 bits takes away from values of several distributions.

    python -m bench.block_error

For int8 and fp8_e4m3: the signal-to-noise ratio of a block, the error of a value as a share of it,
both as medians, and the share of values that become 0.
"""

import numpy as np
from numpy.random import Generator

from harness.block8_oracle import VALUES
from worker_client.staging import casts
from worker_client.staging.wire_rule import WIRE_DTYPES

BLOCKS = 4000
SHAPE = BLOCKS, VALUES


def drawn(rng: Generator) -> dict[str, np.ndarray]:
    one_large = rng.standard_normal(SHAPE)
    one_large[np.arange(BLOCKS), rng.integers(0, VALUES, BLOCKS)] = 1000
    return {
        "normal": rng.standard_normal(SHAPE),
        "Student's t, 3 degrees": rng.standard_t(3, SHAPE),
        "Student's t, 1.5 degrees": rng.standard_t(1.5, SHAPE),
        "normal, scales 0.001 to 1": rng.standard_normal(SHAPE) * 10 ** (-3 * rng.random(SHAPE)),
        "normal, one value 1000": one_large,
    }


def main() -> None:
    chosen = casts.select()
    for name, blocks in drawn(np.random.default_rng(0)).items():
        values = blocks.astype(np.float32)
        for wire in ("int8", "fp8_e4m3"):
            dtype, back = WIRE_DTYPES[wire], np.empty_like(values)
            assert dtype is not None
            sent = np.empty(dtype.nbytes(values.size), np.uint8)
            chosen.narrow(values.reshape(-1).view(np.uint8).data, sent.data, dtype)
            chosen.widen(sent.data, back.reshape(-1).view(np.uint8).data, dtype)
            error = back.astype(np.float64) - values
            power = (values.astype(np.float64) ** 2).sum(axis=1) / (error**2).sum(axis=1)
            share = np.median(np.abs(error / values))
            print(
                f"{name}, {wire}: {10 * np.log10(np.median(power)):.1f} dB, "
                f"a value {share:.2%}, {(back == 0).mean():.2%} become 0"
            )


if __name__ == "__main__":
    main()
