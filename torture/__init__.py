"""Faults on purpose: ranks, reducers and connections are stopped, killed, reset and replaced."""
