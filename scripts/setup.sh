#!/usr/bin/env bash
# Everything from a clean clone to an importable nntile_py in .venv: system packages, StarPU, torch, the extension.
# Idempotent: a second run makes what is missing or has changed.
#   PYTHON=python3.12        the interpreter to make .venv with
#   TORCH='torch==2.13.0'    what to give pip for torch; the default keeps a torch >= 2.11 that .venv has already
#   NNTILE_APT=0             never install system packages, only name them
#   NNTILE_ARCH              the extension's -march (native), STARPU_TARBALL, NNTILE_STARPU_PREFIX: see build_starpu.sh
set -euo pipefail
cd "$(dirname "$0")/.."
begun=
say() { # with the time since the start; what is done and how long it takes comes first
    [ -n "$begun" ] || {
        begun=yes
        echo "setup: makes what nntile_py needs: Debian packages, StarPU (~/.cache/nntile_py), .venv with torch, the compiled
setup: extension. On two cores the first time takes about 8 minutes, longer where downloads are slow; later only what
setup: has changed. An interrupted setup goes on where it was." >&2
    }
    printf 'setup: %d:%02d %s\n' $((SECONDS / 60)) $((SECONDS % 60)) "$*" >&2
}
die() { say "$*"; exit 1; }

system_starpu() { [ -z "${NNTILE_STARPU_PREFIX:-}" ] && pkg-config --atleast-version=1.4.8 starpu-1.4 2>/dev/null; }

find_python() {
    local python
    for python in ${PYTHON:-.venv/bin/python python3 python3.14 python3.13 python3.12 python3.11}; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$python"; return; }
    done
    die "Python >= 3.11 is needed (PYTHON=... names one; apt-get install python3 python3-venv python3-dev)"
}

# Debian's names of what is missing: first what nothing works without, then what StarPU does less without.
needed() {
    command -v g++ >/dev/null || echo g++
    command -v make >/dev/null || echo make
    command -v pkg-config >/dev/null || echo pkg-config
    [ -n "$has_headers" ] || echo "$python_package-dev"
    [ -n "$has_venv" ] || echo "$python_package-venv"
}
wanted() {
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
    # Where another apt-get is at work, wait for it.
    local apt="$sudo env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300"
    # A machine whose package lists are old or absent needs an update first.
    $apt install -y --no-install-recommends "$@" >/dev/null 2>&1 ||
        { $apt update >/dev/null && $apt install -y --no-install-recommends "$@" >/dev/null; }
}

# Where ninja or pip is, by the end of its log: a few words.
at_work() {
    tail -n 1 "$1" | awk '/^Installing collected packages:/ { print "installing " gsub(/,/, "") + 1 " packages"; next } 1' |
        sed -E 's/^ +//; s/^(\[[0-9/]+\]).* -c ([^ ]*\/)?([^ /]+) .*/\1 \3/; s/^(Collecting|Requirement already satisfied:) ([^ ]+) .*/\1 \2/
                s/^(Downloading|Using cached) ([^ ]*\/)?([^-]+-[^-% ]+)[^ ]*\.whl[^ ]*/\1 \3/
                s/^WARNING: Retrying .*: ([^:]+)'\''\)'\'': .*\/([^/]+)\/?$/cannot reach an index for \2: \1/
                s/^WARNING: Retrying .*/pip waits for the network and tries again/
                s/^(.{66}).{5,}$/\1 .../'
}
# slowly LOG COMMAND...: says now and then where the command is; what it prints goes to the log, its end shown if it fails.
ticker=
trap '[ -z "$ticker" ] || kill "$ticker" 2>/dev/null' EXIT
slowly() {
    local log=$1 status=0
    shift
    : >"$log"
    (while sleep "${NNTILE_SETUP_TICK:-20}" >/dev/null 2>&1; do
        say "  at work: $(at_work "$log")"
    done) &
    ticker=$!
    "$@" >"$log" 2>&1 || status=$?
    kill "$ticker" 2>/dev/null || true
    ticker=
    return $status
}
install() { # pip's progress bars would fill the log
    slowly "$pip_log" $py -m pip --disable-pip-version-check install --progress-bar off "$@" && return
    tail -n 15 "$pip_log" >&2
    die "pip install failed; log: $pip_log"
}

python=$(find_python)
look_at_python
missing="$(needed) $(wanted)"
if [ -n "${missing// /}" ]; then
    # shellcheck disable=SC2086
    install_packages $missing || say "not installed: apt-get install" $missing
    look_at_python
    missing=$(needed)
    # shellcheck disable=SC2086
    [ -z "$missing" ] || die "cannot go on without: apt-get install" $missing
fi

# A StarPU that was named once is remembered; the one in the cache folder is found again anyway.
record=.venv/.starpu
named=${NNTILE_STARPU_PREFIX:-}
use() { export PKG_CONFIG_PATH=$1/lib/pkgconfig:$1/lib64/pkgconfig${PKG_CONFIG_PATH:+:$PKG_CONFIG_PATH}; }
if [ -z "$named" ] && [ -r $record ] && ! system_starpu; then use "$(cat $record)"; fi
if system_starpu; then
    named=$(pkg-config --variable=prefix starpu-1.4)
    starpu=$named
else
    if [ -z "$(find "${XDG_CACHE_HOME:-$HOME/.cache}/nntile_py" -maxdepth 1 -name 'starpu-1.4*' 2>/dev/null)$named" ]; then
        say "no StarPU >= 1.4.8 on this system: building one (two minutes)"
    fi
    starpu=$(scripts/build_starpu.sh)
    use "$starpu"
fi

[ -x .venv/bin/pip ] || { say "making .venv with $python"; "$python" -m venv .venv; } || die "no virtual environment: apt-get install $python_package-venv"
if [ -n "$named" ]; then echo "$starpu" >$record; else rm -f $record; fi

py=.venv/bin/python
pip_log=.venv/pip.log
has_torch() {
    $py -c 'import importlib.metadata as m, sys; sys.exit([int(n) for n in m.version("torch").split(".")[:2]] < [2, 11])' 2>/dev/null
}
if [ -n "${TORCH:-}" ] || ! has_torch; then
    say "pip install ${TORCH:=torch==2.13.0} (a large download, 0.2 GB for CPUs, 2 GB and more with CUDA)"
    install "$TORCH"
fi

# The first stamp holds what the installation depends on; the second dates the last compilation.
installed=.venv/.setup-done
compiled=.venv/.compiled
config=$starpu/include/starpu/1.4/starpu_config.h
state=$({ cat pyproject.toml setup.py "$config"; find nntile_py/execution/csrc tasks -name '*.cpp' | sort; ls -d .venv/lib/*/site-packages/torch-*.dist-info
    echo "$PWD $starpu ${NNTILE_ARCH:-}"; } 2>&1 | sha256sum)
compile() {
    say "compiling the extension (three minutes on two cores)"
    mkdir -p build
    slowly build/ext.log $py setup.py -q build_ext --inplace && return
    { grep -A 5 ': error: ' build/ext.log || tail -n 20 build/ext.log; } | head -n 60 >&2
    die "compilation failed; log: build/ext.log"
}
touch $compiled.now
if [ ! -e $installed ] || [ "$(cat $installed)" != "$state" ]; then
    say "pip install setuptools wheel ninja"
    install setuptools wheel ninja
    # Headers that the compilation looks for.
    if $py -W ignore -c 'import sys, torch; sys.exit(not torch.version.cuda)'; then
        install "$(sed -nE 's/^ *"(nvidia-cudnn-frontend==[^"]*)".*/\1/p' pyproject.toml)"
    fi
    compile
    extras=test
    command -v mpicc >/dev/null && extras=test,mpi
    say "pip install -e '.[$extras]' (what is needed beside torch, and for the tests)"
    install --no-build-isolation -e ".[$extras]"
elif [ ! -e $compiled ] || ! compgen -G 'nntile_py/_core*.so' >/dev/null ||
    [ -n "$(find nntile_py/execution/csrc tasks tiles -name '*.[chp]*' -newer $compiled -print -quit)" ]; then
    compile
else
    rm $compiled.now
    exit
fi
$py -c 'import nntile_py._core' || die "the extension does not load"
mv $compiled.now $compiled
echo "$state" >$installed
say "done: .venv/bin/nntile --help; .venv/bin/nntile doctor tells what is there"
