"""The packages, and the extension nntile_py._core: StarPU's runtime and the kernels, compiled against torch."""

import json
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from setuptools import find_packages, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
STARPU = "starpu-1.4"
os.chdir(ROOT)


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def find_starpu() -> None:
    """Makes pkg-config find StarPU: the system's, or the one that scripts/build_starpu.sh keeps (or builds)."""
    if not shutil.which("pkg-config"):
        raise SystemExit("pkg-config is missing: apt-get install pkg-config")
    named = os.environ.get("NNTILE_STARPU_PREFIX")
    if named or subprocess.run(["pkg-config", "--atleast-version=1.4.8", STARPU]).returncode:
        prefix = ask("scripts/build_starpu.sh")
        path = [f"{prefix}/lib/pkgconfig", f"{prefix}/lib64/pkgconfig", os.environ.get("PKG_CONFIG_PATH", "")]
        os.environ["PKG_CONFIG_PATH"] = ":".join(filter(None, path))


def vector_flags() -> list[str]:
    """-march and the ATen vector width that goes with it, as the compiler understands it.

    ATen's vector headers compile for one instruction set, which torch's own kernels name by CPU_CAPABILITY.
    """
    march = f"-march={os.environ.get('NNTILE_ARCH', 'native')}"
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    macros = ask(*cxx, march, "-dM", "-E", "-x", "c++", os.devnull)
    avx512 = all(f"__AVX512{part}__ 1" in macros for part in ("F", "DQ", "VL", "BW"))
    avx2 = "__AVX2__ 1" in macros and "__FMA__ 1" in macros
    capability = "AVX512" if avx512 else "AVX2" if avx2 else "DEFAULT"
    return [march, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]


class Build(cpp_extension.BuildExtension):
    def finalize_options(self) -> None:
        super().finalize_options()
        # A folder that stays, where setuptools would take a temporary one for an editable install: ninja then
        # compiles only what changed.
        self.build_temp = str(ROOT / "build" / "ext")

    def run(self) -> None:
        find_starpu()
        os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        arch = vector_flags()
        libdir = ask("pkg-config", "--variable=libdir", STARPU)
        # Torch's headers include pybind11's. As system headers they are exempt from our warnings.
        system = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
        flags = [*arch, "-std=c++20", "-O3", "-g0", "-fopenmp", "-Wall", "-Wextra", "-Werror", *system]
        # GCC 12 warns of its own AVX-512 header.
        flags += ["-Wno-uninitialized", "-Wno-maybe-uninitialized"]
        flags += ask("pkg-config", "--cflags", STARPU).replace("-I", "-isystem").split()
        (extension,) = self.extensions
        extension.extra_compile_args = {"cxx": flags}
        # The linker is not told -fopenmp: the OpenMP runtime in use has to be the one that torch brings along.
        rpaths = dict.fromkeys([libdir, *cpp_extension.library_paths()])
        extension.extra_link_args = [f"-Wl,-rpath,{path}" for path in rpaths]
        extension.extra_link_args += ask("pkg-config", "--libs", STARPU).split()
        super().run()
        info = {
            "starpu_prefix": ask("pkg-config", "--variable=prefix", STARPU),
            "starpu_version": ask("pkg-config", "--modversion", STARPU),
            "starpu_cflags": ask("pkg-config", "--cflags-only-I", STARPU),
            "starpu_libdir": libdir,
            "torch": torch.__version__,
            "arch": " ".join(arch),
        }
        inside = Path("nntile_py") if self.inplace else Path(self.build_lib) / "nntile_py"
        (inside / "_build_info.json").write_text(json.dumps(info, indent=1) + "\n")


def packages() -> list[str]:
    found = ["nntile_py", "nntile_py.scheduler_configs", "nntile_py.experiments"]
    found += [f"nntile_py.{name}" for name in find_packages("nntile_py")]
    for top in ("tasks", "tiles", "models"):
        found += [f"nntile_py.{top}", *(f"nntile_py.{top}.{name}" for name in find_packages(top))]
    return found


def files(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


setup(
    packages=packages(),
    ext_modules=[
        cpp_extension.CppExtension(
            "nntile_py._core",
            [f for f in files("nntile_py/csrc/*.cpp", "tasks/*.cpp") if not f.endswith("_cuda.cpp")],
            include_dirs=[str(ROOT / "nntile_py" / "csrc")],
            depends=files("nntile_py/csrc/*.h", "tasks/*.h"),
        )
    ],
    cmdclass={"build_ext": Build},
)
