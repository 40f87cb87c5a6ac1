#!/usr/bin/env bash
# Creates a folder, and its .tar.gz, with everything that a machine without network needs beside Python and torch.
#   scripts/bundle.sh [--refresh] [DIR]    DIR defaults to dist/nntile_py-bundle; --refresh updates only its sources
# This machine needs no GPU. The bundle has two builds of StarPU: the build with CUDA loads only where CUDA's libraries are.
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

unset NNTILE_STARPU_PREFIX
cpu=$(NNTILE_CUDA=0 scripts/build_starpu.sh)
cuda=$(NNTILE_CUDA=1 scripts/build_starpu.sh)
rm -rf "$out" "$out.tar.gz"
scripts/copy_starpu.sh "$cpu" "$out/starpu-cpu"
scripts/copy_starpu.sh "$cuda" "$out/starpu-cuda"
[ -e "$out/starpu-cpu/lib/libstarpumpi-1.4.so" ] || say "StarPU has no MPI, and the bundle is for one machine: apt-get install libopenmpi-dev"
for kind in cpu cuda; do mkdir -p "$out/starpu-$kind/share"; cp -r "${!kind}/share/starpupy" "$out/starpu-$kind/share/"; done
# StarPU's headers use one type of this header, which the CUDA wheels of torch lack.
echo 'typedef struct nvmlDevice_st *nvmlDevice_t;' >"$out/starpu-cuda/include/starpu/1.4/nvml.h"
sources

# Only headers: cuDNN itself comes with torch.
say "downloading the headers of cuDNN's frontend"
$python -m pip -q download --no-deps --only-binary=:all: -d "$out/frontend" "$(sed -nE 's/^ *"(nvidia-cudnn-frontend==[^"]*)".*/\1/p' pyproject.toml)"
$python -m zipfile -e "$out"/frontend/*.whl "$out/frontend"
mkdir "$out/cudnn-frontend"
mv "$out/frontend/include" "$out/cudnn-frontend/" # the headers need a folder of this name
rm -rf "$out/frontend"

# install.sh installs the missing packages. Left out: numpy, which comes with torch, and matplotlib, which is large.
say "downloading wheels"
for version in 3.11 3.12 3.13; do
    get="$python -m pip -q download --only-binary=:all: -d $out/wheels --python-version $version
        --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_28_x86_64"
    $get pydantic typer pyyaml safetensors cloudpickle ninja 'setuptools>=77,<82'
    $get --no-deps tokenizers # its dependency serves downloads
    $get mpi4py
done
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
say "$out.tar.gz, $(du -h "$out.tar.gz" | cut -f1); unpacked $(du -sh "$out" | cut -f1)"
