"""Oracles: what is compiled, once more in Python, as its tests and simulators compare it."""
