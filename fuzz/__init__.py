"""Fuzz targets: whatever bytes a peer sends, the other side answers with a typed error or goes on.

``python -m fuzz`` runs them; README.md beside this file says what each checks. A target is a
function that takes bytes and raises if a promise is broken. Coverage-guided runs, the corpus in
the tree, and Hypothesis all call the same functions.
"""
