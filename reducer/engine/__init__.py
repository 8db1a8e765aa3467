"""Jobs, rounds and slots: no I/O, no clock."""
