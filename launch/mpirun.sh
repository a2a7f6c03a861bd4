#!/usr/bin/env bash
# Trains (or runs anything) on the hosts of a hostfile by mpirun. Sets up what is missing here first.
#
#   launch/mpirun.sh hostfiles/cluster.txt -np 8 -- python -m ringtrain.train --config configs/fashion_mnist.toml
#
# Everything after the hostfile is for `ringtrain launch`, which finds out which MPI this is and what it needs to be told.

set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh" python -m ringtrain launch --launcher mpirun --hostfile "$@"
