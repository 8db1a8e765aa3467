"""Simulators of others' that `bench.opinions` asks; each runs apart and imports nothing of ours."""
