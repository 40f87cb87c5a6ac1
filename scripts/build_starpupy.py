"""Compiles StarPU's own Python package, starpupy (`import starpu`), for this interpreter. Needs numpy and a C compiler.

    python scripts/build_starpupy.py PREFIX [FOLDER]

PREFIX: StarPU, built by scripts/build_starpu.sh, which leaves the package's sources in PREFIX/share/starpupy.
FOLDER: where the package is installed; default: site-packages.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy

prefix = Path(sys.argv[1]).resolve()
sources = prefix / "share" / "starpupy"
package = Path(sys.argv[2] if len(sys.argv) > 2 else sysconfig.get_path("purelib")) / "starpu"
if not (sources / "starpu_task_wrapper.c").exists():
    sys.exit(f"{prefix} has no sources of StarPU's Python package; allowed: a StarPU of scripts/build_starpu.sh")
module = package / f"starpupy{sysconfig.get_config_var('EXT_SUFFIX')}"
macros = [
    "STARPU_PYTHON_HAVE_NUMPY",
    # The package uses these macros of common/utils.h, a header of StarPU's sources that is not installed.
    "_STARPU_CALLOC(p,n,s)=((p)=calloc(n,s))",
    "_STARPU_MALLOC(p,s)=((p)=malloc(s))",
]
nvcc = shutil.which("nvcc")
toolkits = [os.environ.get("CUDA_HOME"), nvcc and Path(nvcc).resolve().parents[1], "/usr/local/cuda"]
headers = [
    *(Path(toolkit, "include") for toolkit in toolkits if toolkit),
    sources,
    sysconfig.get_path("include"),
    numpy.get_include(),
    prefix / "include" / "starpu" / "1.4",
]
shutil.rmtree(package, ignore_errors=True)
package.mkdir(parents=True)
subprocess.run(
    [*shlex.split(os.environ.get("CC", "cc")), "-O2", "-fPIC", "-shared", "-w", *(f"-D{macro}" for macro in macros),
     *(f"-I{folder}" for folder in headers), *map(str, sorted(sources.glob("*.c"))), "-o", str(module),
     f"-L{prefix / 'lib'}", "-lstarpu-1.4", f"-Wl,-rpath,{prefix / 'lib'}"],
    check=True,
)  # fmt: skip
for file in sources.glob("*.py"):
    shutil.copy(file, package)
