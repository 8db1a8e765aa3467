"""Memberships without a network: real elastic communicators over jobs in memory, by seeds."""
