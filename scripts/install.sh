#!/usr/bin/env bash
# In a bundle (make bundle): compiles the extension against the torch of this machine. No network, no root.
#   ./install.sh             then: . ./env.sh; nntile doctor
#   PYTHON=python3           interpreter with torch; NNTILE_ARCH: -march for the extension (native)
# Run the script again after moving the folder and after installing another torch.
set -euo pipefail
cd "$(dirname "$0")"
say() { echo "install: $*" >&2; }
die() { say "$*"; exit 1; }
[ -d starpu-cpu ] || die "this script works in the folder that 'make bundle' creates"
python=$(command -v "${PYTHON:-python3}") || die "no ${PYTHON:-python3}"
# Torch uses a shared libstdc++. A compiler with only a static libstdc++ links a second copy, and streams crash. If there is
# no other compiler, attention is compiled without cuDNN's frontend, which uses streams (setup.py).
compiler=
for name in "${CXX:-g++}" g++ /usr/bin/g++; do
    command -v "$name" >/dev/null || continue
    if [ "$("$name" -print-file-name=libstdc++.so)" != libstdc++.so ]; then compiler=$name; break; fi
    compiler=${compiler:-$name}
done
export CXX=${compiler:?install: no g++}

# Reads two lines: the folders of CUDA's libraries (empty without a CUDA torch), and the wheels to install.
{ read -r cuda_libs; read -r missing; } < <("$python" - <<'PY'
import glob, importlib.metadata as metadata, os, shutil, sys, sysconfig
try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME
except ImportError as error:
    sys.exit(f"install: {sys.executable} has no torch ({error}); PYTHON=... names another interpreter")
if sys.version_info < (3, 11) or [int(n) for n in torch.__version__.split(".")[:2]] < [2, 11]:
    sys.exit("install: Python >= 3.11 and torch >= 2.11 are needed")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit(f"install: no Python.h for {sys.executable} (Debian: python3-dev)")
major = (torch.version.cuda or "").split(".")[0]
folders = glob.glob(f"{os.path.dirname(os.path.dirname(torch.__file__))}/nvidia/cu{major}/lib") + [f"{CUDA_HOME}/lib64"]
print(":".join(filter(os.path.isdir, folders)) if major else "")
def lacks(name):
    try:
        version = metadata.version(name)
        return name == "setuptools" and int(version.split(".")[0]) < 77
    except metadata.PackageNotFoundError:
        return True
mpi = ["mpi4py"] if shutil.which("mpicc") and shutil.which("mpirun") else []
print(*filter(lacks, ["pydantic", "typer", "pyyaml", "safetensors", "tokenizers", "ninja", "setuptools", "cloudpickle", *mpi]))
PY
)

rm -rf site
mkdir -p site bin
if [ -n "$missing" ]; then
    say "wheels: $missing"
    # The dependencies of tokenizers are left out: they serve downloads only.
    for name in $missing; do
        deps=; [ "$name" != tokenizers ] || deps=--no-deps
        # shellcheck disable=SC2086
        "$python" -m pip -q --disable-pip-version-check install --no-index --find-links wheels --target site --upgrade $deps "$name"
    done
fi

starpu='starpu-cpu'
if [ -n "$cuda_libs" ]; then
    lost=$(LD_LIBRARY_PATH=starpu-cuda/lib:$cuda_libs ldd starpu-cuda/lib/libstarpu-1.4.so | sed -n 's/ => not found//p' | xargs)
    if [ -z "$lost" ]; then starpu='starpu-cuda'; else say "CPU only: CUDA's libraries lack $lost"; fi
fi

cat >env.sh <<ENV
# Written by install.sh. Source this file.
nntile_bundle=\$(cd "\$(dirname "\${BASH_SOURCE[0]:-\$0}")" && pwd)
export PATH="\$nntile_bundle/bin:\$nntile_bundle/$starpu/bin:\$nntile_bundle/site/bin:\$PATH"
export PYTHONPATH="\$nntile_bundle/src:\$nntile_bundle/site\${PYTHONPATH:+:\$PYTHONPATH}"
export LD_LIBRARY_PATH="\$nntile_bundle/$starpu/lib${cuda_libs:+:$cuda_libs}\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
ENV
cat >bin/nntile <<NNTILE
#!/usr/bin/env bash
. "\$(dirname "\$(readlink -f "\$0")")/../env.sh"
exec "$python" -c 'from nntile_py.cli import main; main()' "\$@"
NNTILE
chmod +x bin/nntile

# These folders are packages inside nntile_py.
for folder in tasks tiles models scheduler_configs experiments; do ln -sfn ../$folder src/nntile_py/$folder; done
say "compiling the extension, with $starpu"
# shellcheck disable=SC1091
. ./env.sh
cd src
mkdir -p build
# An untested compiler may have new warnings, which are no errors here.
NNTILE_STARPU_PREFIX=$PWD/../$starpu NNTILE_CUDNN_FRONTEND=$PWD/../cudnn-frontend/include NNTILE_WERROR=0 "$python" setup.py -q build_ext --inplace >build/ext.log 2>&1 ||
    { { grep -A 5 'error: ' build/ext.log || tail -n 20 build/ext.log; } | head -n 60 >&2; die "compilation failed; log: src/build/ext.log"; }
"$python" -c 'import nntile_py._core' || die "the extension does not load"
"$python" scripts/build_starpupy.py "../$starpu" ../site >build/starpupy.log 2>&1 ||
    say "without StarPU's Python package (import starpu): $(tail -n 1 build/starpupy.log)"
if compgen -G 'nntile_py/_mpi*.so' >/dev/null; then
    "$python" -c 'import nntile_py._mpi' || die "the extension for MPI does not load"
else
    say "without runs on several machines: no mpicc, or its MPI is not Open MPI 4.1 or 5, which StarPU was built for"
fi
say "done: . ./env.sh; nntile doctor"
