"""Histograms of durations: what a quantile is off by, and what is counted."""

import numpy as np
import pytest

from worker_client.protocol._flight import Durations

SHARES = (0.0, 0.01, 0.5, 0.9, 0.99, 1.0)


def counted(values_s):
    found = Durations()
    for value in values_s:
        found.add(value)
    return found


@pytest.mark.parametrize("count", [1, 2, 99, 100, 10_000])
def test_a_quantile_is_right_to_a_sixteenth_from_a_microsecond_to_a_thousand_seconds(count):
    values_s = 10 ** np.random.default_rng(count).uniform(-6, 3, count)
    found = counted(values_s)
    assert found.count == count
    for share in SHARES:
        exact_s = np.quantile(values_s, share, method="inverted_cdf")
        # 1 ns for what is cut off whole nanoseconds, and 64 ns up to 1.024 us.
        assert abs(found.quantile(share) - exact_s) <= max(exact_s / 16, 64e-9) + 1e-9


def test_every_duration_has_a_bucket_and_neighbours_are_an_eighth_apart():
    shown = sorted({counted([at * 1e-9]).quantile(0.5) for at in range(0, 100_000, 16)})
    assert shown[:9] == pytest.approx([(at + 0.5) * 128e-9 for at in range(9)])
    ratios = np.divide(shown[9:], shown[8:-1])
    assert 1.06 < ratios.min() <= ratios.max() < 1.13
    for seconds in (0.0, 1100.0, 1e6):
        assert counted([seconds]).count == 1
    assert 1000 < counted([1e6]).quantile(0.5) < 1100


def test_others_are_counted_as_well_and_none_has_no_quantile():
    assert Durations().quantile(0.99) == 0.0
    found = counted([1e-3] * 98)
    found.merge(counted([1.0] * 2))
    assert found.count == 100
    assert found.quantile(0.98) == pytest.approx(1e-3, rel=1 / 16)
    assert found.quantile(0.99) == pytest.approx(1.0, rel=1 / 16)
