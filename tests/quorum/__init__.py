"""Averagings by quorum without a network: the decision on a virtual clock, by seeds."""
