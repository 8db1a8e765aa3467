"""Extension modules only; everything else about the package is in pyproject.toml."""

import os

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("REDUCTION_BUILD_DEBUG") == "1"
# What is built for others is to be fast, or not to be built.
REQUIRED = os.environ.get("REDUCTION_BUILD_REQUIRED") == "1"

# No -march=native and no -ffast-math: a wheel must run on any CPU, and the order of additions is
# the contract. -ffp-contract=off keeps a*b+c from becoming one rounding where the CPU has FMA.
FLAGS = ["-O0", "-g", "-fsanitize=address,undefined"] if DEBUG else ["-O3", "-g0"]
FLAGS += ["-std=c11", "-Wall", "-Wextra", "-ffp-contract=off"]

LINK_FLAGS = ["-fsanitize=address,undefined"] if DEBUG else []

KERNELS = "reducer/kernels"
WORKER = "worker_client"
VECTOR_HEADERS = [
    f"{KERNELS}/halves.h",
    *(f"{KERNELS}/isa_{variant}.h" for variant in ("generic", "avx2", "avx512")),
]
LOOP_HEADERS = [
    "reducer/failpoints.h",
    "reducer/heap.h",
    "reducer/libzmq.h",
    "reducer/loop.h",
    "reducer/malloc_tuning.h",
    "reducer/map.h",
    "reducer/slots.h",
    "reducer/wire/header.h",
    f"{KERNELS}/fold.h",
]

# What Cython makes of every memoryview, compiled once instead of once in each module.
SHARED = "reducer._cyutility"

extensions = cythonize(
    [
        Extension(
            SHARED,
            sources=["reducer/_cyutility.c"],
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
        ),
        Extension(
            "reducer.kernels._kernels",
            sources=[
                f"{KERNELS}/_kernels.pyx",
                f"{KERNELS}/dispatch.c",
                f"{KERNELS}/fold_generic.c",
                f"{KERNELS}/fold_avx2.c",
                f"{KERNELS}/fold_avx512.c",
            ],
            depends=[f"{KERNELS}/fold.h", f"{KERNELS}/fold_template.h", *VECTOR_HEADERS],
            libraries=["m"],
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
        ),
        *(
            Extension(
                f"reducer.{name}",
                sources=[f"reducer/{name}.pyx", *sources],
                depends=LOOP_HEADERS,
                include_dirs=["reducer"],
                extra_compile_args=FLAGS,
                extra_link_args=LINK_FLAGS,
            )
            for name, sources in (
                ("_slots", ["reducer/slots.c"]),
                ("_loop", ["reducer/loop.c", "reducer/slots.c", "reducer/failpoints.c"]),
            )
        ),
        Extension(
            "worker_client._flight",
            sources=[
                f"{WORKER}/_flight.pyx",
                f"{WORKER}/chunks.c",
                f"{WORKER}/flight.c",
                f"{WORKER}/flight_failures.c",
                f"{WORKER}/loop.c",
                "reducer/failpoints.c",
            ],
            depends=[f"{WORKER}/chunks.h", f"{WORKER}/flight.h", f"{WORKER}/loop.h", *LOOP_HEADERS],
            include_dirs=["reducer"],
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
        ),
        Extension(
            "worker_client._submissions",
            sources=[f"{WORKER}/_submissions.pyx"],
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
        ),
        Extension(
            "worker_client._cast",
            sources=[
                f"{WORKER}/_cast.pyx",
                f"{WORKER}/cast_dispatch.c",
                f"{WORKER}/cast_generic.c",
                f"{WORKER}/cast_avx2.c",
                f"{WORKER}/cast_avx512.c",
            ],
            depends=[f"{WORKER}/cast.h", f"{WORKER}/cast_template.h", *VECTOR_HEADERS],
            include_dirs=["reducer"],
            libraries=["m"],
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
        ),
    ],
    nthreads=os.cpu_count(),
    shared_utility_qualified_name=SHARED,
    compiler_directives={
        "language_level": "3",
        "boundscheck": DEBUG,
        "wraparound": DEBUG,
        "initializedcheck": DEBUG,
        "cdivision": True,
    },
)
for extension in extensions:
    # The plain twins serve instead. cythonize drops this option.
    extension.optional = not REQUIRED

setup(ext_modules=extensions, options={"build_ext": {"parallel": os.cpu_count()}})
