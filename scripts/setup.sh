#!/usr/bin/env bash
# Installs everything that nntile_py needs, from a clean clone to an importable nntile_py in .venv: system packages,
# StarPU, torch, the compiled extension, Python packages.
#   scripts/setup.sh [EXTRA...]    EXTRA: extras of pyproject.toml (test, lint, docs) beside the packages for training
# Idempotent: a second run installs only packages that are missing or have changed.
#   PYTHON=python3.12        interpreter for .venv
#   TORCH='torch==2.13.0'    pip requirement for torch; by default, a torch >= 2.11 in .venv stays
#   NNTILE_CUDA=0 (1)        act as on a machine without (with) an NVIDIA GPU
#   NNTILE_TORCH_INDEX=URL   package index of torch's CPU builds; used if it answers within NNTILE_PROBE_SECONDS (8)
#   NNTILE_APT=0             print missing system packages instead of installing them
#   NNTILE_ARCH              -march for the extension (native); STARPU_TARBALL, NNTILE_STARPU_PREFIX: see build_starpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
torch=torch==2.13.0
torch_index=${NNTILE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}
probe_seconds=${NNTILE_PROBE_SECONDS:-8}
begun=
say() { # prints a message with the time since the start; an explanation precedes the first message
    [ -n "$begun" ] || {
        begun=yes
        echo "setup: installs what nntile_py needs: Debian packages, StarPU (~/.cache/nntile_py), .venv with torch, the
setup: compiled extension. The first run takes about 5 minutes on two cores, longer where downloads are slow; later
setup: runs update what has changed. An interrupted set-up continues where it was." >&2
    }
    printf 'setup: %d:%02d %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*" >&2
}
die() { say "$*"; exit 1; }

# Long commands run in the background, each in a process group of its own, which ends with this script.
groups=()
trap 'for group in "${groups[@]}"; do kill -- -"$group" 2>/dev/null || true; done' EXIT
trap 'exit 130' INT TERM HUP
start() { # start LOG COMMAND...: sets `job` to the command's process id; LOG takes the command's output
    local log=$1
    shift
    set -m
    "$@" >"$log" 2>&1 </dev/null &
    set +m
    job=$!
    groups+=("$job")
}
follow() { # follow LOG PID: waits for a command; prints its progress every 20 s; returns its exit status
    local status=0 rounds=0 rounds_per_message
    rounds_per_message=$(awk -v seconds="${NNTILE_SETUP_TICK:-20}" 'BEGIN { print int(seconds * 10) }')
    # A loop here, not a background subshell that prints: bash reports "wait_for: No record of process" when a subshell
    # is killed just after its start.
    # `read` waits here, not `sleep`: bash loses an ended command's status if a new child gets the command's process id.
    local idle
    exec {idle}<> <(:) # a pipe that nobody writes to
    while kill -0 "$2" 2>/dev/null; do
        read -r -t 0.1 -u "$idle" || true
        rounds=$((rounds + 1))
        [ $((rounds % rounds_per_message)) != 0 ] || say "  at work: $(at_work "$1")"
    done
    exec {idle}>&-
    wait "$2" || status=$?
    return $status
}
at_work() { # the last line of a log in which ninja or pip says what runs, or else the last line, in a few words
    local says='^ *(\[[0-9]+/[0-9]+\]|Collecting|Requirement|Downloading|Using cached|Building|Installing|WARNING: Retrying) ?'
    { grep -aE "$says" "$1" || cat "$1"; } | tail -n 1 | awk '/^Installing collected packages:/ { print "installing " gsub(/,/, "") + 1 " packages"; next } 1' |
        sed -E 's/^ +//; s/^(\[[0-9/]+\]).* -c ([^ ]*\/)?([^ /]+) .*/\1 \3/; s/^(Collecting|Requirement already satisfied:) ([^ ]+) .*/\1 \2/
                s/^(Downloading|Using cached) ([^ ]*\/)?([^-]+-[^-% ]+)[^ ]*\.whl[^ ]*/\1 \3/
                s/^WARNING: Retrying .*: ([^:]+)'\''\)'\'': .*\/([^/]+)\/?$/cannot reach an index for \2: \1/
                s/^WARNING: Retrying .*/pip waits for the network and tries again/
                s/^(.{66}).{5,}$/\1 .../'
}

system_starpu() { [ -z "${NNTILE_STARPU_PREFIX:-}" ] && pkg-config --atleast-version=1.4.8 starpu-1.4 2>/dev/null; }

find_python() {
    local python
    for python in ${PYTHON:-.venv/bin/python python3 python3.14 python3.13 python3.12 python3.11}; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$python"; return; }
    done
    die "Python >= 3.11 is needed (PYTHON=... names an interpreter; apt-get install python3 python3-venv python3-dev)"
}

# Debian packages that are missing: required() stops the set-up, optional() only adds abilities to StarPU.
required() {
    command -v g++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
    command -v pkg-config >/dev/null || echo pkg-config
    [ -n "$has_headers" ] || echo "$python_package-dev"
    [ -n "$has_venv" ] || echo "$python_package-venv"
}
optional() {
    system_starpu && return
    pkg-config --exists hwloc 2>/dev/null || echo libhwloc-dev
    pkg-config --exists fxt 2>/dev/null || echo libfxt-dev
    command -v mpicc >/dev/null || echo libopenmpi-dev
}
look_at_python() {
    read -r python_package has_headers has_venv < <("$python" - <<'PY'
import importlib.util, os, sys, sysconfig
header = os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))
venv = all(map(importlib.util.find_spec, ("venv", "ensurepip")))
# A virtual environment that exists needs no ensurepip.
venv = venv or os.path.exists(".venv/bin/pip")
print("python%d.%d" % sys.version_info[:2], "yes" if header else "-", "yes" if venv else "-")
PY
    )
    [ "$has_headers" = yes ] || has_headers=
    [ "$has_venv" = yes ] || has_venv=
}
install_packages() {
    local sudo=
    [ "${NNTILE_APT:-1}" != 0 ] && command -v apt-get >/dev/null || return 1
    if [ "$(id -u)" != 0 ]; then sudo -n true 2>/dev/null && sudo="sudo -n" || return 1; fi
    say "apt-get install $*"
    # If another apt-get is running, wait for it.
    local apt="$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300"
    # If the package lists are old or absent, update them first.
    $apt install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
        { $apt update >/dev/null && $apt install -y --no-install-recommends "$@" >/dev/null; }
}

py=.venv/bin/python
pip_log=.venv/pip.log
pip() { # runs in the background, without progress bars in the log; Python compiles modules at their first import
    start "$pip_log" $py -m pip --disable-pip-version-check install --progress-bar off --no-compile "$@"
}
pip_done() { # pip_done PID: waits for `pip`
    follow "$pip_log" "$1" && return
    tail -n 15 "$pip_log" >&2
    die "pip install failed; log: $pip_log"
}
has_torch() {
    $py -c 'import importlib.metadata as m, sys; sys.exit([int(n) for n in m.version("torch").split(".")[:2]] < [2, 11])' 2>/dev/null
}
has_gpu() {
    case ${NNTILE_CUDA:-} in 0) return 1 ;; 1) return 0 ;; esac
    compgen -G '/dev/nvidia[0-9]*' >/dev/null || timeout 10 nvidia-smi -L 2>/dev/null | grep -q '^GPU'
}
# Without an NVIDIA GPU, torch is the CPU build of PyTorch's own index, if that index answers. No other package is ever
# requested from it: torch comes without its dependencies, which the next call of pip installs from pip's usual indexes.
choose_torch() {
    local problem how="TORCH='torch==...' chooses another torch, PYTHON=... the interpreter"
    [ -z "${TORCH:-}" ] || { torch=$TORCH; say "torch: pip install $torch, as TORCH says (PYTHON=... chooses the interpreter)"; return; }
    if has_gpu; then
        say "torch: pip install $torch, for the NVIDIA GPU of this machine, 2 GB and more (NNTILE_CUDA=0 takes the CPU build; $how)"
        return
    fi
    if problem=$(timeout "$probe_seconds" $py scripts/probe_index.py "$torch_index" "${torch#*==}"); then
        say "torch: pip install $torch, the CPU build of PyTorch's index, 0.2 GB: no NVIDIA GPU here (NNTILE_CUDA=1 takes the CUDA build; $how)"
        pip --no-deps --retries 1 --timeout 15 --index-url "$torch_index" "$torch"
        follow "$pip_log" "$job" && return
        problem="its download failed ($(tail -n 1 "$pip_log"))"
    fi
    say "torch: pip install $torch from pip's usual indexes, up to 2 GB: no NVIDIA GPU here, but PyTorch's index of CPU builds cannot be used: ${problem:-no answer within $probe_seconds s} ($how)"
}

python=$(find_python)
look_at_python
missing="$(required) $(optional)"
if [ -n "${missing// /}" ]; then
    # shellcheck disable=SC2086
    install_packages $missing || say "not installed: apt-get install" $missing
    look_at_python
    missing=$(required)
    # shellcheck disable=SC2086
    [ -z "$missing" ] || die "cannot go on without: apt-get install" $missing
fi

# StarPU is built while pip downloads. A StarPU of NNTILE_STARPU_PREFIX is remembered in .venv/.starpu.
record=.venv/.starpu
prefix_file=build/starpu-prefix
named=${NNTILE_STARPU_PREFIX:-}
use() { export PKG_CONFIG_PATH=$1/lib/pkgconfig:$1/lib64/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}; }
find_starpu() { scripts/build_starpu.sh 2>&3; }
mkdir -p build
if [ -z "$named" ] && [ -r $record ] && ! system_starpu; then use "$(cat $record)"; fi
if system_starpu; then
    named=$(pkg-config --variable=prefix starpu-1.4)
    start $prefix_file echo "$named"
else
    if [ -z "$(find "${XDG_CACHE_HOME:-$HOME/.cache}/nntile_py" -maxdepth 1 -name 'starpu-1.4*' 2>/dev/null)$named" ]; then
        say "no StarPU >= 1.4.8 on this system: building StarPU (two minutes) beside the next steps"
    fi
    start $prefix_file find_starpu 3>&2
fi
starpu_job=$job

[ -x .venv/bin/pip ] || { say "creating .venv with $python"; "$python" -m venv .venv; } || die "no virtual environment: apt-get install $python_package-venv"
set -- "$@" starpupy
command -v mpicc >/dev/null && set -- "$@" mpi
mapfile -t requirements < <($py - "$@" 2>/dev/null <<'PY'
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extras = project["optional-dependencies"]
print(*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name]), sep="\n")
PY
)
[ ${#requirements[@]} -gt 0 ] || die "pyproject.toml lacks an extra of these: $*"
tools=(setuptools wheel ninja)
if [ -n "${TORCH:-}" ] || ! has_torch; then
    choose_torch
    pip "$torch" "${tools[@]}"
    pip_done "$job"
    tools=()
fi
wait "$starpu_job" || exit 1
starpu=$(cat $prefix_file)
system_starpu || use "$starpu"
if [ -n "$named" ]; then echo "$starpu" >$record; else rm -f $record; fi

# Stamps: the state that the extension depends on, the installed requirements, the time of the last compilation.
installed=.venv/.setup-done
packages=.venv/.requirements
compiled=.venv/.compiled
config=$starpu/include/starpu/1.4/starpu_config.h
state=$({ cat pyproject.toml setup.py "$config"; find nntile_py/execution/csrc tasks -name '*.cpp' | sort; ls -d .venv/lib/*/site-packages/torch-*.dist-info
    echo "$PWD $starpu ${NNTILE_ARCH:-}"; } 2>&1 | sha256sum)
changed=
[ -e $installed ] && [ "$(cat $installed)" = "$state" ] || { changed=yes; rm -f $packages; }
lacking=
for line in "${requirements[@]}"; do grep -qsxF -- "$line" $packages || lacking=yes; done
stale=
[ -z "$changed" ] && [ -e $compiled ] && compgen -G 'nntile_py/_core*.so' >/dev/null &&
    [ -z "$(find nntile_py/execution/csrc tasks tiles -name '*.[chp]*' -newer $compiled -print -quit)" ] || stale=yes
[ -n "$lacking$stale" ] || exit 0

if [ -n "$changed" ]; then
    # Headers for attention by cuDNN, if torch is a CUDA build.
    if $py -W ignore -c 'import sys, torch; sys.exit(not torch.version.cuda)'; then
        tools+=("$(sed -nE 's/^ *"(nvidia-cudnn-frontend==[^"]*)".*/\1/p' pyproject.toml)")
    fi
    if [ ${#tools[@]} -gt 0 ]; then
        say "pip install ${tools[*]}"
        pip "${tools[@]}"
        pip_done "$job"
    fi
fi
pip_job=
if [ -n "$lacking" ]; then
    say "pip install the packages of pyproject.toml:$(printf ' %s' dependencies "$@")"
    pip "${requirements[@]}"
    pip_job=$job
fi
if [ -n "$stale" ]; then
    say "compiling the extension (about two minutes on two cores)"
    touch $compiled.now
    start build/ext.log $py setup.py -q build_ext --inplace
    follow build/ext.log "$job" || {
        [ -z "$pip_job" ] || wait "$pip_job" || true # pip is not interrupted
        { grep -A 5 ': error: ' build/ext.log || tail -n 20 build/ext.log; } | head -n 60 >&2
        die "compilation failed; log: build/ext.log"
    }
fi
if [ -n "$pip_job" ]; then
    pip_done "$pip_job"
    { printf '%s\n' "${requirements[@]}"; cat $packages 2>/dev/null || true; } | sort -u >$packages.new
    mv $packages.new $packages
fi
if [ -n "$changed" ]; then
    say "pip install -e . --no-deps"
    pip --no-build-isolation --no-deps -e .
    pip_done "$job"
    $py scripts/build_starpupy.py "$starpu" >build/starpupy.log 2>&1 ||
        say "without StarPU's Python package (import starpu): $(tail -n 1 build/starpupy.log)"
fi
$py -c 'import nntile_py._core' || die "the extension does not load"
[ -z "$stale" ] || mv $compiled.now $compiled
echo "$state" >$installed
say "done: .venv/bin/nntile --help; .venv/bin/nntile doctor reports the state of the installation"
