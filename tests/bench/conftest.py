"""Results as the commands write them, without measuring anything."""

from datetime import datetime, timezone

import pytest

from bench.results import (
    ChaosResults,
    DdpResults,
    DdpRow,
    Machine,
    Results,
    Row,
    Run,
    Sample,
    Settings,
    Soak,
    Trend,
)

MIB = 1 << 20
PAYLOAD = 119.5e6  # bytes/s
ALGBW = {"pool-4-bf16-keys": 200e6, "pool-4": 118e6, "gloo": 80e6, "mpi": 54e6, "ring": 79e6}


@pytest.fixture
def run():
    machine = Machine(
        cpu="AMD EPYC",
        cores=2,
        memory_bytes=24 << 30,
        kernel="6.1",
        python="3.11.7",
        versions={"numpy": "2.0", "torch": "2.6"},
        commit="0123456789ab",
    )
    return Run(
        time=datetime(2026, 1, 2, tzinfo=timezone.utc),
        machine=machine,
        command="python -m bench.some --option 1",
        environment={"REDUCTION_CHUNK_BYTES": "4096"},
        load=0.1,
    )


def row(name, nbytes, **changes):
    algbw, ours = ALGBW[name], name.startswith("pool")
    ratios = {other: algbw / ALGBW[other] for other in ("gloo", "mpi", "ring") if ours}
    figures = {
        "contender": name,
        "ours": ours,
        "workers": 4,
        "reducers": 4 if ours else 0,
        "cards": 8 if ours else 4,
        "nbytes": nbytes,
        "count": nbytes // 4,
        "dtype": "float32",
        "op": "sum",
        "iterations": 2000 if nbytes < MIB else 3,
        "rounds_us": [nbytes / algbw * 1e6],
        "time_us": nbytes / algbw * 1e6,
        "mean_us": nbytes / algbw * 1.01e6,
        "p99_us": nbytes / algbw * 1.1e6,
        "algbw": algbw,
        "busbw": 1.5 * algbw,
        "wrong": 0,
        "checked": nbytes,
        "exact": ours,
        "payload_share": algbw / PAYLOAD,
        "limit": PAYLOAD,
        "worker_cpu_s_per_gb": 12.34,
        "reducer_cpu_s_per_gb": 12.34 if ours else None,
        "ratios": ratios,
        "card_ratios": {other: ratio / 2 for other, ratio in ratios.items()},
    }
    return Row(**figures | changes)


@pytest.fixture
def all_reduces(run):
    rows = [row(name, nbytes) for nbytes in (4 << 10, 256 * MIB) for name in ALGBW]
    settings = Settings(mbit=1000, payload_rates=[PAYLOAD], workers=[4], rounds=3, skipped={})
    return Results(**dict(run), kind="allreduce", settings=settings, rows=rows)


@pytest.fixture
def soak(run):
    names = ("worker 0", "reducer 0")
    samples = [
        Sample(process=name, done=1000 * at, seconds=at, rss=90 * MIB, files=20, threads=9)
        for at in range(5)
        for name in names
    ]
    trends = [
        Trend(
            process=name,
            start_rss=90 * MIB,
            end_rss=90 * MIB,
            bytes_per_1000=100.0,
            growth=200.0,
            flat=True,
            files=(20, 21),
            threads=(9, 9),
        )
        for name in names
    ]
    found = Soak(
        workers=2,
        reducers=2,
        all_reduces=4000,
        nbytes=10**9,
        seconds=9.0,
        wrong=0,
        checked=10**6,
        samples=samples,
        trends=trends,
    )
    settings = Settings(mbit=None, payload_rates=[], workers=[2], rounds=1, skipped={})
    return Results(**dict(run), kind="soak", settings=settings, soak=found)


@pytest.fixture
def ddp(run):
    def one(name, step_ms):
        exchange = name != "no-op"
        return DdpRow(
            variant=name,
            bucket_cap_mb=64,
            samples_per_s=128e3 / step_ms,
            rounds_ms=[step_ms],
            step_ms=step_ms,
            median_ms=step_ms,
            p99_ms=step_ms,
            cpu_ms=100.0,
            exposed_ms=step_ms - 110,
            all_reduce_ms=900.0 if exchange else None,
            ideal_ms=830.0 if exchange else None,
            exposed_over_ideal=1.01 if exchange else None,
            wrong=0,
            checked=4000 if exchange else 0,
            identical=True if exchange else None,
            largest_difference=1e-7 if exchange else None,
        )

    return DdpResults(
        **dict(run),
        mbit=1000,
        payload_rate=PAYLOAD,
        model="resnet50",
        nbytes=102_000_000,
        parameters=161,
        batch=32,
        workers=4,
        reducers=4,
        rounds=2,
        steps=2,
        compute_ms=100.0,
        backward_ms=67.0,
        wire_ms=855.0,
        rows=[one("reducers", 950.0), one("gloo-25", 1400.0), one("no-op", 110.0)],
        ours_over_gloo=1.474,
    )


@pytest.fixture
def chaos(run):
    return ChaosResults(
        **dict(run),
        workers=4,
        reducers=3,
        kills=200,
        steps=2345,
        lost=0,
        errors=[],
        identical=True,
        median_s=0.04,
        undisturbed_s=0.03,
        stall_s=0.51,
        recovery_median_s=0.1,
        recovery_p99_s=0.4,
        moved=900,
        claimed=20,
        supplied=10,
    )


@pytest.fixture
def micro():
    """What pytest-benchmark 5 writes, without what the report leaves out."""

    def one(group, name, median, **extra):
        stats = {"median": median, "iqr": median / 10, "rounds": 50, "mean": median, "min": median}
        return {"group": group, "name": name, "params": None, "extra_info": extra, "stats": stats}

    return {
        "machine_info": {
            "python_version": "3.11.7",
            "release": "6.1",
            "system": "Linux",
            "cpu": {"count": 2, "brand_raw": "AMD EPYC"},
        },
        "commit_info": {"id": "0123456789ab", "dirty": False},
        "benchmarks": [
            one("fold float32", "test_fold[one pass-1 MiB]", 1e-3, nbytes=8 * MIB),
            one("fold float32", "test_fold[chain-1 MiB]", 2e-3),
            one(None, "test_header", 3e-7),
        ],
        "datetime": "2026-01-02T00:00:00+00:00",
        "version": "5.3.1",
    }
