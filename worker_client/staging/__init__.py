"""Callers' arrays and tensors as host memory, and back: views, page-locked copies, casts."""
