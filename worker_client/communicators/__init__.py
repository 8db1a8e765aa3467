"""One membership of one job: whole, without lost ranks, with a process group to fall back on."""
