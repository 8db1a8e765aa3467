"""Arithmetic of links; nothing is measured."""
