#!/usr/bin/env bash
# The shortest proof that this machine can train: two ranks, one epoch of the digits. Sets up what is missing first.
# Its exit code is the training's. Arguments are passed on to it: launch/smoke.sh --train.epochs 3

set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

exec launch/setup.sh horovodrun -np 2 -H localhost:2 \
    python -m ringtrain.train --config configs/digits.toml --train.epochs 1 "$@"
