"""ZeroMQ's protocol itself, ZMTP 3.1 with NULL and CURVE, without sockets: bytes in, events out."""
