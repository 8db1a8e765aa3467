#!/bin/sh
# How mpirun reaches a host of the lab, in place of ssh: mpi_agent.sh HOST COMMAND...
host=$1
shift
exec ip netns exec "$host" sh -c "$*"
