#!/usr/bin/env bash
# Copies an installation of StarPU and the libraries that it loads to a folder for other machines, without debug symbols.
#   scripts/copy_starpu.sh FROM TO    FROM: the installation; TO: a new folder with include, lib, bin and licenses
# The other machine provides the C library, GCC's runtime, CUDA and MPI. A program finds the copies by an rpath to TO/lib, or
# by LD_LIBRARY_PATH.
set -euo pipefail
from=$1 to=$2
die() { echo "copy_starpu: $*" >&2; exit 1; }
for macro in USE_FXT HAVE_HWLOC; do
    grep -q "define STARPU_$macro 1" "$from/include/starpu/1.4/starpu_config.h" ||
        die "$from lacks FxT or hwloc: apt-get install libfxt-dev libhwloc-dev, then scripts/build_starpu.sh --force"
done
mkdir -p "$to/lib" "$to/bin" "$to/licenses"
cp -r "$from/include" "$to/"
cp -a "$from"/lib/libstarpu-1.4.so* "$to/lib/"
# StarPU-MPI, for several machines. The other machine needs an MPI library with the same soname: Open MPI 4.1 or 5.
[ ! -e "$from/lib/libstarpumpi-1.4.so" ] || cp -a "$from"/lib/libstarpumpi-1.4.so* "$to/lib/"
ldd "$from/lib/libstarpu-1.4.so" |
    sed -nE '/^\s*(lib(c|m|gcc_s|stdc\+\+|dl|rt|pthread|cu[a-zA-Z]*|nv[a-zA-Z]*)\.so|linux-vdso)/!s/.* => (\/\S+).*/\1/p' |
    while read -r library; do
        cp -L "$library" "$to/lib/"
        package=$(dpkg-query -S "*/$(basename "$(readlink -f "$library")")" 2>/dev/null | head -n 1 | cut -d: -f1 || true)
        [ -z "$package" ] || cp -L "/usr/share/doc/$package/copyright" "$to/licenses/$package.txt"
    done
for file in "$from"/bin/*; do if head -c 4 "$file" | grep -q ELF; then cp "$file" "$to/bin/"; fi; done
find "$to/lib" "$to/bin" -type f -exec strip --strip-unneeded {} +
for file in "$from"/share/doc/starpu/COPYING*; do [ ! -e "$file" ] || cp "$file" "$to/licenses/StarPU-$(basename "$file").txt"; done
[ ! -e "$to/licenses/libfxt2.txt" ] || cp -L /usr/share/common-licenses/GPL-2 "$to/licenses/libfxt2-GPL-2.txt"
cat >"$to/licenses/README.txt" <<TEXT
The folder lib/ beside this folder has shared libraries of other projects. You may replace each by another build.
StarPU (LGPL 2.1 or later) is Debian's source package starpu, changed and compiled by nntile_py's scripts/build_starpu.sh.
Each other library is from the Debian package that a file in this folder is named after; "apt-get source" downloads its
source.
TEXT
