"""Micro-benchmarks of single parts, by pytest-benchmark; `bench/README.md` says how to run them.

Every benchmark records in ``extra_info["nbytes"]`` how many bytes one call processes, so that GB/s
are ``nbytes / median / 1e9``, and compares the result of its last call with NumPy's, bit for bit.
"""
