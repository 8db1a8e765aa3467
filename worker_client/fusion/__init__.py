"""Tensors with names, in any order: a queue, what all ranks have of them, and fusion buffers."""
