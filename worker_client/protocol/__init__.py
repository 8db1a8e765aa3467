"""What a worker says and when, and what it has in flight: no I/O, no clock."""
