"""Benchmarks: of kernels, of whole all-reduces, and a laboratory of hosts to run them in."""
