#!/usr/bin/env bash
# Trains (or runs anything) on the hosts of a hostfile by horovodrun. Sets up what is missing here first.
#
#   launch/horovodrun.sh hostfiles/cluster.txt -np 8 -- python -m ringtrain.train --config configs/fashion_mnist.toml
#
# Everything after the hostfile is for `ringtrain launch`; --launcher horovodrun-gloo takes Gloo instead of MPI.

set -euo pipefail

exec "$(dirname -- "${BASH_SOURCE[0]}")/setup.sh" python -m ringtrain launch --launcher horovodrun --hostfile "$@"
