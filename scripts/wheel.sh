#!/usr/bin/env bash
# Makes dist/nntile_py-*.whl for Linux x86-64, the Python and the torch of .venv: with StarPU, hwloc and FxT inside.
#   scripts/wheel.sh [--dist DIR] [ARCH...]     by default, ARCH is x86-64-v3 x86-64-v4: AVX2 and AVX-512
# The extension is compiled for each ARCH (a value of -march); at its import the best one for the CPU is taken. The wheel is
# for one machine without CUDA: StarPU's MPI and CUDA parts need libraries of the target machine ("make bundle").
set -euo pipefail
cd "$(dirname "$0")/.."
say() { echo "wheel: $*" >&2; }
dist=dist
if [ "${1:-}" = --dist ]; then dist=$2; shift 2; fi
[ $# -gt 0 ] || set -- x86-64-v3 x86-64-v4
py=.venv/bin/python
NNTILE_STARPU_PREFIX=$(NNTILE_CUDA=0 scripts/build_starpu.sh)
export NNTILE_STARPU_PREFIX NNTILE_WHEEL="$*"
build=build/wheel
rm -rf $build
mkdir -p build "$dist"
say "compiling the extension for $*"
# pip refuses the wheel where the C library is older than this machine's.
glibc=$(getconf GNU_LIBC_VERSION | sed 's/.* //; s/\./_/')
$py setup.py -q build --build-base $build --build-lib $build/lib bdist_wheel --bdist-dir $build/bdist --dist-dir $build/dist \
    --plat-name "manylinux_${glibc}_x86_64" >build/wheel.log 2>&1 || {
    { grep -A 5 ': error: ' build/wheel.log || tail -n 20 build/wheel.log; } | head -n 60 >&2
    say "no wheel; log: build/wheel.log"
    exit 1
}
$py -m wheel unpack -d $build/unpacked $build/dist/*.whl >/dev/null
inside=$(echo $build/unpacked/*)
find "$inside" -name '_core*.so' -exec strip --strip-unneeded {} +
# The extension works only with the torch that it was compiled for.
torch=$($py -c 'import importlib.metadata as m; print(m.version("torch").split("+")[0])')
sed -i "s/^Requires-Dist: torch>=.*/Requires-Dist: torch==$torch/" "$inside"/*.dist-info/METADATA
starpu=$inside/nntile_py/starpu
scripts/copy_starpu.sh "$NNTILE_STARPU_PREFIX" "$starpu"
rm -f "$starpu"/lib/libstarpumpi*
# A wheel holds no links: each library gets the one name that programs load.
for file in $(find "$starpu/lib" -type f); do
    soname=$(readelf -d "$file" | sed -nE 's/.*\(SONAME\).*\[(.*)\]/\1/p')
    [ "$(basename "$file")" = "$soname" ] || mv "$file" "$starpu/lib/$soname"
done
find "$starpu/lib" -type l -delete
# Of the headers, nntile doctor reads one.
find "$starpu/include" -type f ! -name starpu_config.h -delete
$py -m wheel pack -d "$dist" "$inside" >/dev/null
wheel=$(ls -t "$dist"/*.whl | head -n 1)
say "$wheel, $(du -h "$wheel" | cut -f1), for torch $torch"
