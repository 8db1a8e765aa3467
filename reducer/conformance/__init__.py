"""The conformance kit: it plays a client against any reducer, and a reducer against any client."""
