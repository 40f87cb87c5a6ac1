#!/usr/bin/env bash
# Compiles the CUDA side of the C++, syntax only: no GPU, no driver and no torch with CUDA are needed.
#   scripts/check_cuda_syntax.sh [FILE...]     by default all of nntile_py/execution/csrc and tasks
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- nntile_py/execution/csrc/*.cpp tasks/*.cpp
python=python3
[ ! -x .venv/bin/python ] || python=.venv/bin/python
"$python" scripts/args_headers.py . build/args
prefix=$(NNTILE_CUDA=1 scripts/build_starpu.sh)
substitutes=$(mktemp -d)
trap 'rm -rf "$substitutes"' EXIT
# A file that only a build of torch with CUDA generates.
mkdir -p "$substitutes/c10/cuda/impl"
echo '#define C10_CUDA_BUILD_SHARED_LIBS' >"$substitutes/c10/cuda/impl/cuda_cmake_macros.h"
mapfile -t flags < <("$python" - "$prefix" "$substitutes" <<'PY'
import re, sys, sysconfig
from torch.utils import cpp_extension
prefix, substitutes = sys.argv[1:]
toolkit = re.search(r"-L(\S+)/lib\S* .*-lcudart", open(f"{prefix}/lib/pkgconfig/starpu-1.4.pc").read())[1]
folders = [*cpp_extension.include_paths(), sysconfig.get_path("include"), f"{prefix}/include/starpu/1.4", f"{toolkit}/include"]
print(*(f"-isystem{folder}" for folder in folders), f"-idirafter{substitutes}", sep="\n")
PY
)
# shellcheck disable=SC2016
printf '%s\0' "$@" | xargs -0 -P "${MAX_JOBS:-2}" -I{} sh -c 'echo "$1"; file=$1; shift; exec "$@" "$file"' - {} \
    "${CXX:-g++}" -fsyntax-only -std=c++20 -march=native -fopenmp -Wall -Wextra -Werror -Wno-uninitialized -Wno-maybe-uninitialized \
    -DNNTILE_CUDA -Inntile_py/execution/csrc -Ibuild/args "${flags[@]}"
