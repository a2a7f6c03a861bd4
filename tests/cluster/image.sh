#!/usr/bin/env bash
# Builds the Dockerfile on a Debian machine that has no Docker daemon, and runs the smoke test in the image; then four
# ranks on two hosts made of namespaces, each in the image with its sshd.
#
#   make image              TensorFlow for CPUs
#   make image GPU=1        with CUDA and NCCL; imported and run without a driver
#
# The base image is made by debootstrap, in place of the one on Docker Hub. Needs root and the network; packages that
# are missing are installed. All that is made is in one folder of TMPDIR (leave it 25 GB), which goes at the end.

set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."

GPU=${GPU:-0}
BASE=docker.io/library/debian:bookworm-slim
IMAGE=localhost/ringtrain
MIRROR=${MIRROR:-}         # of Debian; empty: as debootstrap has it

main() {
    ((EUID == 0)) || { say "needs root: debootstrap and buildah make files of several owners"; exit 2; }
    tools
    SCRATCH=$(mktemp -d --tmpdir ringtrain-image-XXXXXX)
    trap clean_up EXIT
    timed "$BASE by debootstrap" make_base
    timed "$IMAGE by buildah, GPU=$GPU" \
        store build --isolation chroot --pull-never --build-arg GPU="$GPU" --tag "$IMAGE" .
    CONTAINER=$(store from --pull-never "$IMAGE")
    FILES=$(store mount "$CONTAINER")
    nothing_to_build_with
    say "size: $(size_mb "$FILES") MB, of which $(size_mb "$FILES/opt/ringtrain/.venv") MB are the environment"
    timed "Horovod has what it should" inside python -c "
import horovod.tensorflow as hvd
assert hvd.mpi_built() and hvd.gloo_built() and bool(hvd.nccl_built()) == bool($GPU), 'not built as asked for'
print('MPI, Gloo, NCCL', hvd.nccl_built() or 'not', 'built')"
    timed "smoke test" inside launch/smoke.sh
    timed "four ranks on two hosts" python3 tests/cluster/image_hosts.py "$FILES"
}

tools() {
    local missing=() tool
    for tool in debootstrap:debootstrap buildah:buildah sshd:openssh-server ip:iproute2; do
        PATH=$PATH:/usr/sbin:/sbin command -v "${tool%:*}" >/dev/null || missing+=("${tool#*:}")
    done
    ((${#missing[@]})) || return 0
    say "apt-get install ${missing[*]}"
    apt-get update -q >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
}

# Left out is what the image on Docker Hub leaves out as well. The machine's own certificate authorities go in: behind a
# proxy that has one, pip would not get out of the build otherwise.
make_base() {
    local root=$SCRATCH/base container own
    debootstrap --variant=minbase bookworm "$root" ${MIRROR:+"$MIRROR"}
    rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* \
        "$root"/usr/share/{doc,info,locale,man}/*
    for own in /usr/local/share/ca-certificates/*.crt; do
        [[ ! -e $own ]] || install -D -m 644 -t "$root/usr/local/share/ca-certificates" "$own"
    done
    tar -C "$root" -cf "$SCRATCH/base.tar" .
    rm -rf "$root"
    container=$(store from scratch)
    store add "$container" "$SCRATCH/base.tar" /
    store config --cmd bash "$container"
    store commit --rm "$container" "$BASE"
    rm "$SCRATCH/base.tar"
}

size_mb() { du -sm "$1" | cut -f 1; }

nothing_to_build_with() {
    local found
    found=$(find "$FILES" -xdev \( -name 'g++*' -o -name nvcc -o -name cmake -o -name '*.deb' -o -name 'ssh_host_*_key' \
        -o -path '*/.cache/*' -o -path '*/setup/build.*' \) -print)
    [[ -z $found ]] || { say "the image has what only its build needs:"; echo "$found" >&2; exit 1; }
    [[ $(inside id -u) == 1000 ]] || { say "the image runs as root"; exit 1; }
}

store() { TMPDIR=$SCRATCH buildah --storage-driver vfs --root "$SCRATCH/storage" --runroot "$SCRATCH/run" "$@"; }
inside() { store run --isolation chroot "$CONTAINER" "$@"; }

# Runs a step with its output shown and says how long it took.
timed() {
    local title=$1 started=$SECONDS
    shift
    say "$title ..."
    "$@" >&2
    say "$title: $((SECONDS - started)) s"
}

say() { echo "image: $*" >&2; }

clean_up() {
    [[ -z ${CONTAINER:-} ]] || store umount "$CONTAINER" >/dev/null || true
    rm -rf "$SCRATCH"
}

main
