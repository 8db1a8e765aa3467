"""Threads, clock and sockets: who moves a session on, and over what."""
