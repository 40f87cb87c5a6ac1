#!/usr/bin/env bash
# Makes a folder, and its .tar.gz beside it, with all that a machine without network needs on top of Python and torch.
#   scripts/bundle.sh [--refresh] [DIR]    DIR is dist/nntile_py-bundle; --refresh renews only the sources in it
# No GPU is needed here. StarPU is there twice: with CUDA it loads only where CUDA's libraries are.
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "bundle: $*" >&2; }
die() { say "$*"; exit 1; }
refresh=
if [ "${1:-}" = --refresh ]; then refresh=1; shift; fi
out=${1:-dist/nntile_py-bundle}
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python

sources() {
    rm -rf "$out/src"
    mkdir -p "$out/src"
    git ls-files -z --cached --others --exclude-standard | tar --null -T - --ignore-failed-read -cf - | tar -xf - -C "$out/src"
    git describe --always --dirty >"$out/src/nntile_py/_commit.txt"
    cp scripts/install.sh "$out/"
}
if [ -n "$refresh" ]; then
    [ -d "$out/wheels" ] || die "no bundle in $out: run it without --refresh first"
    sources
    exit
fi

# What libstarpu needs and a bare machine lacks: not the C library, and nothing of CUDA.
needs() { ldd "$1"/lib/libstarpu-1.4.so | sed -nE '/^\s*(lib(c|m|gcc_s|stdc\+\+|dl|rt|pthread|cu[a-zA-Z]*|nv[a-zA-Z]*)\.so|linux-vdso)/!s/.* => (\/\S+).*/\1/p'; }
copy_starpu() {
    local to=$out/$1 from=$2 file macro
    for macro in USE_FXT HAVE_HWLOC; do
        grep -q "define STARPU_$macro 1" "$from/include/starpu/1.4/starpu_config.h" ||
            die "$from lacks FxT or hwloc: apt-get install libfxt-dev libhwloc-dev, then scripts/build_starpu.sh --force"
    done
    mkdir -p "$to/lib" "$to/bin"
    cp -r "$from/include" "$to/"
    cp -a "$from"/lib/libstarpu-1.4.so* "$to/lib/"
    # For several machines. The MPI library itself is the machine's: one with this one's soname, as Open MPI's 4.1 and 5.
    if [ -e "$from/lib/libstarpumpi-1.4.so" ]; then
        cp -a "$from"/lib/libstarpumpi-1.4.so* "$to/lib/"
    else
        say "$from has no MPI, and the bundle is for one machine: apt-get install libopenmpi-dev"
    fi
    for file in $(needs "$from"); do cp -L "$file" "$to/lib/"; done
    for file in "$from"/bin/*; do if head -c 4 "$file" | grep -q ELF; then cp "$file" "$to/bin/"; fi; done
    find "$to/lib" "$to/bin" -type f -exec strip --strip-unneeded {} +
}
unset NNTILE_STARPU_PREFIX
cpu=$(NNTILE_CUDA=0 scripts/build_starpu.sh)
cuda=$(NNTILE_CUDA=1 scripts/build_starpu.sh)
rm -rf "$out" "$out.tar.gz"
copy_starpu starpu-cpu "$cpu"
copy_starpu starpu-cuda "$cuda"
# CUDA's wheels that torch brings along lack this header, of which StarPU's headers want one type.
echo 'typedef struct nvmlDevice_st *nvmlDevice_t;' >"$out/starpu-cuda/include/starpu/1.4/nvml.h"
sources

# Headers alone: cuDNN itself comes along with torch.
say "downloading the headers of cuDNN's frontend"
$python -m pip -q download --no-deps --only-binary=:all: -d "$out/frontend" "$(sed -nE 's/^ *"(nvidia-cudnn-frontend==[^"]*)".*/\1/p' pyproject.toml)"
$python -m zipfile -e "$out"/frontend/*.whl "$out/frontend"
mkdir "$out/cudnn-frontend"
mv "$out/frontend/include" "$out/cudnn-frontend/" # the headers want a folder of this name
rm -rf "$out/frontend"

# install.sh takes those that the machine lacks. Left out: numpy, which comes along with torch, and matplotlib, for its size.
say "downloading wheels"
for version in 3.11 3.12 3.13; do
    get="$python -m pip -q download --only-binary=:all: -d $out/wheels --python-version $version
        --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64"
    $get pydantic typer pyyaml safetensors ninja 'setuptools>=77,<82'
    $get --no-deps tokenizers # its dependency serves downloads
    $get mpi4py
done
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
say "$out.tar.gz, $(du -h "$out.tar.gz" | cut -f1); unpacked $(du -sh "$out" | cut -f1)"
