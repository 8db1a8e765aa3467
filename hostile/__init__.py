"""Attacks by others: strangers without a key, and tenants that take more than their share."""
