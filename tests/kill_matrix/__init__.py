"""The kill matrix: small bugs, put one by one into a copy of the tree, and the tests that notice.

``python -m tests.kill_matrix`` goes on where the latest run has stopped. `results.tsv` keeps what
came of each bug, and `equivalent.toml` says why some change nothing that anyone could notice.
"""
