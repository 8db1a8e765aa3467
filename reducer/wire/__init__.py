"""The wire protocol: `docs/protocol.md` is the specification, the modules are its code.

Standard library only: this package knows neither sockets nor arrays, and touches a payload only to
take its length.
"""
