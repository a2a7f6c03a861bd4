#!/usr/bin/env bash
# Tries and measures ringtrain on the GPUs of this host, in about half an hour, and writes a page in Markdown.
#
#     benchmarks/gpu.sh [PAGE]                                    # gpu.md
#     MODEL=cnn BATCH=8 SIZE=28 TURNS=1 STEPS=5 MINUTES=0.5 benchmarks/gpu.sh   # a trial of the script itself, also without a GPU
#
# In an environment with ringtrain and TensorFlow for GPUs (docs/installation.md), from a checkout. A command that fails is
# on the page as well; the exit code is then 1.

set -uo pipefail

page=$(realpath "${1:-gpu.md}")
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
model=${MODEL:-resnet50} batch=${BATCH:-64} size=${SIZE:-224} turns=${TURNS:-3} steps=${STEPS:-40}
minutes=${MINUTES:-5}
gpus=$(python -c 'import tensorflow as tf; print(len(tf.config.list_physical_devices("GPU")))') || exit
ranks=$((gpus ? gpus : 2))
hosts=localhost:$ranks
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
job=(--model.name "$model" --data.name synthetic --data.image-size "$size" --train.batch-size "$batch")
failed=0

# Adds a section: its title, the command, how long it took, and the end of its output.
section() {
    local title=$1 begin=$SECONDS code=0
    shift
    echo "gpu.sh: $title: $*"
    "$@" >"$scratch/output" 2>&1 || code=$?
    ((code == 0)) || failed=1
    {
        printf '\n## %s\n\nExit code %d after %d s.\n\n```\n$ %s\n' "$title" "$code" $((SECONDS - begin)) "$*"
        sed 's/\x1b\[[0-9;]*m//g' "$scratch/output" | tail -n 60
        printf '```\n'
    } >>"$page"
}

{
    printf '# ringtrain on %d GPUs, %s\n\n' "$gpus" "$(date +%F)"
    nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null | sed 's/^/- /'
    printf -- '- %s, batch %d per rank, %d pixels, %d ranks\n' "$model" "$batch" "$size" "$ranks"
} >"$page"

section 'Set-up' ringtrain doctor
section 'Smoke test' ringtrain train -H "$hosts" --run.directory "$scratch/runs" --data.name digits --model.name cnn --train.epochs 3
# Results before speed: equal to one process, also after a kill, and where two ranks share a GPU; random jobs against Keras.
proof=(python -m ringtrain.train --data.name digits --model.name cnn --run.directory "$scratch/runs")
((ranks == 1)) || section 'Proof' ringtrain prove -np "$ranks" -H "$hosts" -- "${proof[@]}"
section 'Proof, ranks that share a GPU' ringtrain prove -np $((2 * ranks)) -H localhost:$((2 * ranks)) -- "${proof[@]}" --device.share-gpus
section 'Jobs drawn from seeds' python tests/fuzz/run.py --minutes "$minutes" --no-shrink
section 'Allreduce' ringtrain bench allreduce -H "$hosts" --turns "$turns"
if ((gpus)); then
    section 'Topology' nvidia-smi topo -m
    # The largest figure of each GPU while it trains, as the driver sees it. TensorFlow takes memory as it needs it.
    (while sleep 1; do nvidia-smi --query-gpu=index,memory.used --format=csv,noheader; done >"$scratch/memory") &
    sampler=$!
    samples=(--data.num-samples $((batch * ranks * steps)))
    section 'Memory' ringtrain train -H "$hosts" --run.directory "$scratch/runs" "${job[@]}" --train.epochs 1 "${samples[@]}"
    kill "$sampler"
    largest='$2 + 0 > most[$1] { most[$1] = $2 + 0 } END { for (gpu in most) print "GPU " gpu ": " most[gpu] " MiB" }'
    section 'Memory, largest of each GPU' awk -F, "$largest" "$scratch/memory"
fi

measure=(ringtrain bench train -H "$hosts" --turns "$turns" --steps "$steps")
section 'Training' "${measure[@]}" -- "${job[@]}"
section 'Training, gradients compiled by XLA' "${measure[@]}" -- "${job[@]}" --train.jit
section 'Training, 16 bits' "${measure[@]}" -- "${job[@]}" --train.precision mixed_float16
peers=ringtrain,by-hand,towers-by-hand,ringtrain-alone,fit-alone
section 'Other trainers' python benchmarks/measure_peers.py --workers "$ranks" --peers "$peers" --turns "$turns" --steps "$steps" --limit 600 -- "${job[@]}"

echo "gpu.sh: $page"
exit "$failed"
