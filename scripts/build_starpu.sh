#!/usr/bin/env bash
# Builds StarPU >= 1.4.8 once per user. Stdout is the installation prefix and nothing else.
#   scripts/build_starpu.sh [--prefix DIR] [--tarball FILE] [--no-cuda] [--force]
# Environment: NNTILE_STARPU_PREFIX, STARPU_TARBALL, CUDA_HOME, MAX_JOBS, and NNTILE_CUDA: 0 builds without CUDA; 1 builds
# with CUDA and downloads a toolkit (1.6 GB, in the cache) if none is complete; by default, CUDA is used if there is a toolkit.
set -euo pipefail
umask 022
export LC_ALL=C

oldest=1.4.8
changes=11 # version of the changes to StarPU's sources below; with another version, StarPU is built again
cache=${XDG_CACHE_HOME:-$HOME/.cache}/nntile_py
prefix=${NNTILE_STARPU_PREFIX:-}
tarball=${STARPU_TARBALL:-}
cuda=${NNTILE_CUDA:-}
force=

say() { echo "starpu: $*" >&2; }
die() { say "$*"; exit 1; }
while [ $# -gt 0 ]; do
    case $1 in
        --prefix) prefix=${2:?--prefix needs a folder}; shift ;;
        --tarball) tarball=${2:?--tarball needs a file}; shift ;;
        --no-cuda) cuda=0 ;;
        --force) force=1 ;;
        -h | --help) sed -n '2,5s/^# //p' "$0"; exit ;;
        *) die "unknown argument $1 (--help)" ;;
    esac
    shift
done

no_source() {
    say "$1"
    say "StarPU's sources cannot be downloaded here. Either name a release tarball (1.4.10 is the tested version):"
    say "    STARPU_TARBALL=/path/to/starpu-1.4.10.tar.gz make setup"
    say "or install StarPU >= $oldest so that 'pkg-config --modversion starpu-1.4' finds it (see PKG_CONFIG_PATH)."
    exit 1
}

# With CUDA, StarPU includes all of these headers, and some toolkits lack them.
cuda_dir=
no_cuda="no CUDA toolkit found"
find_cuda() {
    local nvcc dir header
    nvcc=$(command -v nvcc || true)
    for dir in "${CUDA_HOME:-}" "${CUDA_PATH:-}" ${nvcc:+"$(dirname "$(dirname "$(readlink -f "$nvcc")")")"} /usr/local/cuda; do
        [ -n "$dir" ] && [ -x "$dir/bin/nvcc" ] || continue
        for header in cuda_runtime.h cublas_v2.h cublasLt.h cusparse.h cusolverDn.h; do
            [ -e "$dir/include/$header" ] && continue
            no_cuda="$dir has nvcc but no include/$header: install the rest of the CUDA toolkit"
            continue 2
        done
        cuda_dir=$dir
        return
    done
}
# NVIDIA's wheels form a toolkit; only the file names that a linker expects are missing. Building needs no GPU or driver.
download_cuda() {
    local release target python=python3 library
    release=$(nvcc --version 2>/dev/null | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
    target=$cache/cuda-${release:=13.0}
    [ -e "$target/.complete" ] || {
        [ ! -x "$(dirname "$0")/../.venv/bin/python" ] || python=$(dirname "$0")/../.venv/bin/python
        say "downloading the CUDA $release toolkit to $target ($no_cuda)"
        "$python" -m pip -q install --no-compile --upgrade --target "$target" \
            "cuda-toolkit[cccl,crt,cublas,cudart,cusolver,cusparse,nvcc,nvml,nvvm]==$release.*" >&2 ||
            die "no CUDA toolkit: name one by CUDA_HOME"
        cuda_dir=$(ls -d "$target"/nvidia/cu*)
        ln -sfn lib "$cuda_dir/lib64"
        for library in "$cuda_dir"/lib/lib*.so.*; do ln -sf "${library##*/}" "${library%%.so.*}.so"; done
        touch "$target/.complete"
    }
    cuda_dir=$(ls -d "$target"/nvidia/cu*)
}
if [ "$cuda" = 0 ]; then no_cuda="switched off"; else find_cuda; fi
if [ "$cuda" = 1 ] && [ -z "$cuda_dir" ]; then download_cuda; fi

# A prefix is complete if it has a .pc file and no mark of an interrupted 'make install'.
version_in() {
    [ ! -e "$1/.installing" ] || return 1
    PKG_CONFIG_LIBDIR=$1/lib/pkgconfig:$1/lib64/pkgconfig:$(pkg-config --variable pc_path pkg-config) \
        pkg-config --atleast-version=$oldest starpu-1.4 && compgen -G "$1/lib*/pkgconfig/starpu-1.4.pc" >/dev/null
}
done_already() {
    local dir
    [ -z "$force" ] || return 1
    # shellcheck disable=SC2012
    for dir in ${prefix:+"$prefix"} $([ -n "$prefix" ] || ls -d "$cache"/starpu-1.4.*-$changes${cuda_dir:+-cuda} 2>/dev/null | sort -Vr); do
        if version_in "$dir"; then echo "$dir"; return; fi
    done
    return 1
}

missing=
for tool in gcc g++ make pkg-config tar flock; do command -v $tool >/dev/null || missing+=" $tool"; done
[ -z "$missing" ] || die "missing:$missing (apt-get install build-essential pkg-config util-linux)"
if done_already; then exit; fi

base=${prefix:-$cache}
mkdir -p "$base"
base=$(cd "$base" && pwd)
[ -z "$prefix" ] || prefix=$base
exec 9>"$base/.starpu.lock"
flock -n 9 || { say "waiting for another build ($base/.starpu.lock)"; flock 9; }
if done_already; then exit; fi

log=$base/starpu-build.log
: >"$log"
rm -rf "$base"/.starpu-build.*
work=$(mktemp -d "$base/.starpu-build.XXXXXX")
apt_dir=$(mktemp -d)
job= # process group of the command that runs in the background
trap '[ -z "$job" ] || { kill -- -"$job" 2>/dev/null; wait "$job" 2>/dev/null || true; }; rm -rf "$work" "$apt_dir"' EXIT
trap 'exit 130' INT TERM HUP

# Downloads Debian's source package with apt, which checks signatures and hashes, from the archive that the system's apt
# sources name. Lists, cache and sources file are private: the system's apt does not change.
download() {
    command -v apt-get >/dev/null || no_source "no apt-get on this system"
    chmod 755 "$apt_dir"
    mkdir -p "$apt_dir"/{lists,cache/archives}/partial
    python3 - "$apt_dir" >>"$log" 2>&1 <<'PY' || no_source "the system's apt sources name no Debian archive (log: $log)"
import glob, re, sys
entries = []  # (uri, suites, components, lines to carry over)
for name in ["/etc/apt/sources.list", *sorted(glob.glob("/etc/apt/sources.list.d/*"))]:
    try:
        text = open(name, encoding="utf-8").read()
    except OSError:
        continue
    text = re.sub(r"(?m)^\s*#.*\n?", "", text)
    if name.endswith(".list"):
        for kind, options, uri, rest in re.findall(r"(?m)^\s*(deb|deb-src)\s+(?:\[([^]]*)\]\s+)?(\S+)\s+(.*)$", text):
            kept = [f"{k}: {v.replace(',', ' ')}" for k, v in re.findall(r"(signed-by|trusted)=(\S+)", options)]
            entries.append((uri, rest.split()[:1], rest.split()[1:], kept))
    elif name.endswith(".sources"):
        for stanza in re.split(r"\n\s*\n", text):
            fields = {k.lower(): v for k, v in re.findall(r"(?m)^([\w-]+):((?:.*(?:\n[ \t].*)*))", stanza)}
            if fields.get("enabled", "yes").strip().lower() in ("no", "false", "0"):
                continue
            kept = [f"{k}:{fields[k]}" for k in ("signed-by", "trusted") if k in fields]
            for uri in fields.get("uris", "").split():
                entries.append((uri, fields.get("suites", "").split(), fields.get("components", "").split(), kept))
# Debian's archive proper has "main" and a path that ends in "debian" (a snapshot's date may follow).
archive = re.compile(r"debian(\.list)?/?(\d{8}T\d{6}Z/?)?$")
chosen = [e for e in entries if "main" in e[2] and archive.search(e[0]) and not any("security" in s for s in e[1])]
if not chosen:
    sys.exit("no Debian archive among the apt sources")
uri, _, _, kept = chosen[0]
with open(f"{sys.argv[1]}/starpu.sources", "w") as out:
    out.write("\n".join(["Types: deb-src", f"URIs: {uri}", "Suites: unstable", "Components: main", *kept]) + "\n")
PY
    cat >"$apt_dir/apt.conf" <<CONF
Dir::Etc::sourcelist "$apt_dir/starpu.sources";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "$apt_dir/lists";
Dir::Cache "$apt_dir/cache";
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
CONF
    say "reading the source index of Debian unstable"
    apt-get -c="$apt_dir/apt.conf" -q --error-on=any update >>"$log" 2>&1 || { tail -n 5 "$log" >&2; no_source "apt-get update failed (log: $log)"; }
    local version
    version=$(apt-cache -c="$apt_dir/apt.conf" showsrc starpu 2>>"$log" | sed -n 's/^Version: \(1\.4\..*\)/\1/p' | sort -V | tail -n 1)
    [ -n "$version" ] || no_source "Debian unstable has no StarPU 1.4"
    say "downloading starpu $version"
    (cd "$apt_dir" && apt-get -c="$apt_dir/apt.conf" -q source --download-only --tar-only "starpu=$version") >>"$log" 2>&1 ||
        { tail -n 5 "$log" >&2; no_source "apt-get source failed (log: $log)"; }
    tarball=$(ls "$apt_dir"/starpu_*.orig.tar.*)
}

[ -n "$tarball" ] || download
[ -r "$tarball" ] || die "no such tarball: $tarball"
mkdir "$work/src"
tar -xf "$tarball" -C "$work/src" --strip-components=1 2>>"$log" || die "not a readable tarball: $tarball ($(tail -n 1 "$log"))"
cd "$work/src"
[ -x configure ] || die "$tarball has no configure script: take a release tarball of StarPU, not a snapshot of its repository"
version=$(./configure --version | sed -n '1s/^StarPU configure //p')
case $version in 1.4.*) ;; *) die "$tarball holds StarPU ${version:-(not StarPU)}; needed: 1.4, $oldest or later" ;; esac
[ "$(printf '%s\n' $oldest "$version" | sort -V | head -n 1)" = $oldest ] || die "$tarball holds StarPU $version; needed: $oldest or later"
if [ -z "$prefix" ]; then
    prefix=$cache/starpu-$version-$changes${cuda_dir:+-cuda}
    rm -rf "$prefix"
fi

# An idle worker of StarPU spins on its core and slows down other threads there to a few per cent of their speed, such as
# workers of other processes. With this change, a worker spins for 200 us only and yields the core at each turn; then a CPU
# worker looks for a task every 50 us.
backoff=src/drivers/driver_common/driver_common.c
cat >src/drivers/driver_common/idle.h <<'C'
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>
static void offer_core(int fresh, int may_sleep)
{
	static __thread struct timespec since;
	struct timespec now, pause = { 0, 50000 };
	clock_gettime(CLOCK_MONOTONIC, &now);
	if (!since.tv_sec) prctl(PR_SET_TIMERSLACK, 1000UL);
	if (fresh || !since.tv_sec) since = now;
	if (may_sleep && (now.tv_sec - since.tv_sec) * 1000000000L + now.tv_nsec - since.tv_nsec > 200000)
		nanosleep(&pause, NULL);
	else
		sched_yield();
}
C
fresh='delay <= (int)worker->config->conf.driver_spinning_backoff_min'
sed -i "s/^\(\s*\)while *(delay--)/\1offer_core($fresh, worker->arch == STARPU_CPU_WORKER);\n&/; 0,/^#include <common/s//#include \"idle.h\"\n&/" $backoff
grep -q '^\s*offer_core(' $backoff && grep -q '^#include "idle.h"' $backoff || say "$backoff has changed: idle workers will keep their cores busy"

# With FxT, StarPU records each read of a tile (32 bytes) until the next write, also without a trace: memory grew with each
# evaluation.
deps=src/core/dependencies/implicit_data_deps.c
sed -i '/^void _starpu_release_data_enforce_sequential_consistency(/,/^}/s/^#ifndef STARPU_USE_FXT/#ifdef STARPU_USE_FXT\n\t\tif (_starpu_bound_recording || _starpu_fxt_started)\n#else/' $deps
grep -q '|| _starpu_fxt_started' $deps || say "$deps has changed: memory will grow by 32 bytes at each read of a tile"

# The installation folder has no performance models, and a StarPU that was moved ("make bundle") warns that the folder is
# missing.
sed -i '/^\s*_perf_model_add_dir(STARPU_SAMPLING_DIR,/d' src/core/perfmodel/perfmodel.c

# A worker that evicts tiles from main memory to a disk serves other requests meanwhile. A request for room on a device
# would evict tiles to main memory, which is refused during an eviction: a deadlock, which this change avoids.
copies=src/datawizard/copy_driver.c
sed -i 's/DO_NOT_ALLOC || _starpu_is_reclaiming(dst_node))/DO_NOT_ALLOC || _starpu_is_reclaiming(dst_node) || (starpu_node_get_kind(dst_node) == STARPU_CUDA_RAM \&\& _starpu_is_reclaiming(STARPU_MAIN_RAM)))/' $copies
grep -q '_starpu_is_reclaiming(STARPU_MAIN_RAM)' $copies || say "$copies has changed: a disk beside CUDA devices may come to a standstill"

# The size of main memory comes from hwloc, which adds up the NUMA nodes. On virtual machines whose memory grows after boot, the
# nodes keep their first size: StarPU then sees 23 of 125 GiB. sysconf returns the current size.
topology=src/core/topology.c
sed -i 's/global_mem = hwloc_get_root_obj(topology->hwtopology)->total_memory;/global_mem = (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);/; 0,/^#include <common/s//#include <unistd.h>\n&/' $topology
grep -q 'sysconf(_SC_PHYS_PAGES)' $topology || say "$topology has changed: memory that was added after the machine's start is not used"

# StarPU runs at most 2 prefetches and 5 other copies between two devices at a time. Our copies queue on a stream behind the
# kernels that write their data, and a layer's weights are twelve copies.
requests=src/datawizard/data_request.h
sed -i -E 's/^(#define MAX_PENDING_(PREFETCH_)?REQUESTS_PER_NODE) [0-9]+/\1 16/' $requests
[ "$(grep -cE '^#define MAX_PENDING_(PREFETCH_)?REQUESTS_PER_NODE 16' $requests)" = 2 ] || say "$requests has changed: few copies will travel at a time"

# Tiles marked as unused for long should be evicted from a device first. StarPU does this only for tiles with a home in main
# memory; ours have none. Also, StarPU marks only such tiles "dirty", and moves other tiles to the end of the eviction list.
chunks=src/datawizard/memalloc.c
device='starpu_node_get_kind(node) == STARPU_CUDA_RAM'
sed -i "s/if (mc->data && mc->data->home_node != -1)/if (mc->data \&\& (mc->data->home_node != -1 || $device))/
    /^static struct _starpu_mem_chunk \*_starpu_memchunk_init/,/^}/s/mc->clean = 1;/mc->clean = handle->home_node != -1 || starpu_node_get_kind(replicate->memory_node) != STARPU_CUDA_RAM;/
    /^void _starpu_memchunk_recently_used/,/^}/s/mc->wontuse = 0;/&\n\tif (mc->data \&\& mc->data->home_node == -1 \&\& $device)\n\t\tmc->clean = 0;/" $chunks
[ "$(grep -c STARPU_CUDA_RAM $chunks)" = 3 ] || say "$chunks has changed: tiles will leave a full device in the order of their use"

# Without a disk, StarPU never frees a copy in main memory, even if the tile is valid on a device, too, or on a device only. So main
# memory fills with old copies of tiles that once left a GPU. A copy that is not the only valid one may go.
sed -i '/^choose_target(/,/^}/{/if (starpu_node_get_kind(node) == STARPU_CPU_RAM)$/,/} else {/s/^\(\s*\)target = get_better_disk_can_accept_size(handle, node);/&\n\1unsigned other;\n\1for (other = 0; target == -1 \&\& handle->per_node[node].state != STARPU_OWNER \&\& other < STARPU_MAXNODES; other++)\n\1\tif (other != node \&\& handle->per_node[other].state != STARPU_INVALID)\n\1\t\ttarget = other;/}' $chunks
grep -q 'target == -1 && handle->per_node' $chunks || say "$chunks has changed: old copies of tiles will stay in main memory"

# StarPU evicts no tile from a device while main memory is full, even if main memory is full of such copies. So copies are freed
# for the tile. With a disk, tiles that are only in main memory would have to move under the locks that are held here.
sed -i "/^choose_target(/,/^}/{/home_node == -1/,\$s/\(_starpu_memory_manager_test_allocate_size(i, .*\) == 1)\$/\1 == 1 ||\n\t\t\t\t    ($device \&\& starpu_disk_swap_node < 0 \&\& free_potentially_in_use_mc(i, 0, size_handle, STARPU_FETCH) >= size_handle))/}" $chunks
grep -q 'starpu_disk_swap_node < 0 && free_potentially' $chunks || say "$chunks has changed: full main memory will stop evictions"

# StarPU's Python package (starpupy) is compiled for the interpreter of .venv by build_starpupy.py, so only its sources are
# installed. Changes: a task may take handles of other libraries, which know how to show their data to Python (a function
# in the handle's user data); a numpy handle has its address where handles of variables have it, so that other kernels find
# it; an exception in a task's function is printed and gives None (StarPU crashed); nntile_py's idle workers stay awake.
python=starpupy/src
if [ -d $python ]; then
    object_of='PyObject *(*)(starpu_data_handle_t, void *)'
    sed -i "s/STARPU_ASSERT_MSG(0, \"unexpected object.*/PyTuple_SetItem(pArglist, i, (($object_of)starpu_data_get_user_data(task->handles[h_index]))(task->handles[h_index], descr[h_index]));/
        /PyObject \*rv = PyObject_CallObject(func_py/,/PyErr_PrintEx/s/PyErr_PrintEx(1);/{ PyErr_PrintEx(1); Py_INCREF(Py_None); rv = Py_None; }/" $python/starpu_task_wrapper.c
    sed -i '/^\tchar\* py_buffer;/d; s/^\tPyObject\* object;/\tchar *py_buffer;\n&/' $python/starpupy_buffer_interface.h
    sed -i '/^#include <common\/utils.h>/d' $python/*.c
    sed -i 's/^\( *\)return starpupy.init()/\1starpupy.init()\n\1core = sys.modules.get("nntile_py._core")\n\1if core: core.share_workers()/; s/^import os$/&\nimport sys/' $python/intermedia.py
    [ "$(cat $python/starpu_task_wrapper.c $python/starpupy_buffer_interface.h $python/intermedia.py |
        grep -cE 'starpu_data_get_user_data|rv = Py_None; }|^\s*char \*py_buffer;|core.share_workers')" = 4 ] ||
        say "$python has changed: 'import starpu' will not share tiles with nntile_py"
else
    say "no $python: StarPU's Python package cannot be compiled"
fi

# Blocking drivers stay off: they set the pipeline of tasks per CUDA device to 0.
flags=(--prefix="$prefix" --libdir="$prefix/lib" --disable-static --enable-fast
    --enable-maxcpus=256 --enable-maxcudadev=8 --enable-maxbuffers=16 --enable-maxnodes=16
    --disable-build-doc --disable-build-examples --disable-build-tests --disable-opencl --disable-hip --disable-socl
    --disable-starpufft --disable-starpupy --disable-fortran --disable-openmp --disable-glpk --disable-papi --without-x)
if [ -n "$cuda_dir" ]; then
    flags+=(--with-cuda-dir="$cuda_dir" LDFLAGS="-Wl,-rpath,$cuda_dir/lib64 ${LDFLAGS:-}")
    [ -e "$cuda_dir/include/nvml.h" ] || say "no nvml.h in the toolkit: bandwidths between several GPUs will be misjudged"
    # CUDA 13 dropped cudaDeviceProp.computeMode.
    sed -i 's/props\[devid\]\.computeMode ==/({ int mode = 0; cudaDeviceGetAttribute(\&mode, cudaDevAttrComputeMode, devid); mode; }) ==/' \
        src/drivers/cuda/driver_cuda.c src/drivers/cuda/driver_cuda1.c
else
    flags+=(--disable-cuda)
fi
pkg-config --exists hwloc || { flags+=(--without-hwloc); say "no hwloc: workers are not placed by topology (apt-get install libhwloc-dev)"; }
pkg-config --exists fxt || { flags+=(--disable-fxt); say "no FxT: no traces (apt-get install libfxt-dev)"; }
command -v mpicc >/dev/null || { flags+=(--disable-mpi); say "no MPI: one node only (apt-get install libopenmpi-dev)"; }

# Runs a command with its output in the log, and prints the log's last file every 20 s. The command runs in a process group
# of its own, which ends with this script. A loop here, not a background subshell, prints: bash reports "wait_for: No record
# of process" when a subshell is killed just after its start. The command keeps the lock: an orphan would build on.
slowly() {
    local status=0 rounds=0 rounds_per_message from where
    rounds_per_message=$(awk -v seconds="${NNTILE_SETUP_TICK:-20}" 'BEGIN { print int(seconds * 10) }')
    from=$(stat -c %s "$log")
    set -m
    "$@" >>"$log" 2>&1 </dev/null &
    set +m
    job=$!
    while kill -0 "$job" 2>/dev/null; do
        sleep 0.1
        rounds=$((rounds + 1))
        [ $((rounds % rounds_per_message)) = 0 ] || continue
        where=$(tail -c +$((from + 1)) "$log" | { grep -aoE '^ +CC +[^ ]+|^checking .*' || true; } | tail -n 1 | sed -E 's/^ +CC +/compiling /')
        say "  at work for $SECONDS s: ${where:0:60}"
    done
    wait "$job" || status=$?
    job=
    return $status
}
failed() {
    tail -n 25 "$log" >&2
    die "$1 failed; log: $log"
}
say "configuring $version, $([ -n "$cuda_dir" ] && echo "CUDA from $cuda_dir" || echo "CUDA off ($no_cuda)")"
slowly ./configure "${flags[@]}" || { cp config.log "$base/starpu-config.log"; say "config.log: $base/starpu-config.log"; failed configure; }
say "compiling (a minute or two)"
slowly make -j"${MAX_JOBS:-$(nproc)}" || failed make
mkdir -p "$prefix"
touch "$prefix/.installing"
make install >>"$log" 2>&1 || failed "make install"
if [ -d $python ]; then
    mkdir -p "$prefix/share/starpupy"
    cp $python/*.c $python/*.h $python/*.py "$prefix/share/starpupy/"
fi
rm "$prefix/.installing"
version_in "$prefix" || die "pkg-config does not find StarPU in $prefix; log: $log"
say "StarPU $version is in $prefix"
echo "$prefix"
