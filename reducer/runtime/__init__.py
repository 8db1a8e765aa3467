"""One serving thread: its ROUTER socket, loop, guard and keys."""
