"""Build of the package: its folders, and the extensions nntile_py._core (runtime and kernels) and nntile_py._mpi.

NNTILE_WHEEL (scripts/wheel.sh) lists values of -march: nntile_py._core is compiled for each value.
"""

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
from setuptools import Extension, find_packages, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
STARPU = "starpu-1.4"
ARGS = ROOT / "build" / "args"  # headers of the kernels' arguments
GROUPS = ROOT / "build" / "groups"  # generated sources, each of which includes several sources
NATIVE = os.environ.get("NNTILE_ARCH", "native")
WHEEL = os.environ.get("NNTILE_WHEEL", "").split()
# torch looks for ninja on the PATH; pip has installed it beside this interpreter. Without ninja, files compile in turn.
os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
os.chdir(ROOT)
sys.path.insert(0, str(ROOT / "scripts"))
sys.path.append(str(ROOT / "nntile_py" / "system"))
import args_headers  # noqa: E402
from sources import fingerprint  # noqa: E402


def ask(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def find_starpu() -> dict[str, str]:
    """Return folders and flags of the system's StarPU, or of the StarPU that scripts/build_starpu.sh builds."""
    named = os.environ.get("NNTILE_STARPU_PREFIX")
    if named and (Path(named) / "lib" / f"lib{STARPU}.so").exists() and not (Path(named) / "lib/pkgconfig").exists():
        # The StarPU of a bundle has no .pc file, since that would name the folder of the build.
        named = str(Path(named).resolve())
        cflags = f"-I{named}/include/starpu/1.4"
        return {"prefix": named, "libdir": f"{named}/lib", "cflags": cflags, "libs": f"-L{named}/lib -l{STARPU}"}
    if not shutil.which("pkg-config"):
        raise SystemExit("pkg-config is missing: apt-get install pkg-config")
    if named or subprocess.run(["pkg-config", "--atleast-version=1.4.8", STARPU]).returncode:
        prefix = ask("scripts/build_starpu.sh")
        path = [f"{prefix}/lib/pkgconfig", f"{prefix}/lib64/pkgconfig", os.environ.get("PKG_CONFIG_PATH", "")]
        os.environ["PKG_CONFIG_PATH"] = ":".join(filter(None, path))
    options = {"prefix": "--variable=prefix", "libdir": "--variable=libdir", "cflags": "--cflags", "libs": "--libs"}
    return {name: ask("pkg-config", option, STARPU) for name, option in options.items()}


def starpu_macros(cflags: str) -> dict[str, str]:
    headers = (Path(flag.removeprefix("-I")) / "starpu_config.h" for flag in cflags.split())
    text = next(header.read_text() for header in headers if header.is_file())
    return dict(re.findall(r"^#define STARPU_(\w+) (.*)$", text, re.MULTILINE))


def cuda_flags() -> tuple[list[str], list[str], list[str]]:
    """Return the compiler's and the linker's flags for CUDA's host side, and the folders of CUDA's libraries.

    Headers and libraries are in CUDA_HOME, in NVIDIA's wheels, which a CUDA torch depends on, or in both.
    """
    major = torch.version.cuda.split(".")[0]
    wheels = Path(torch.__file__).parents[1] / f"nvidia/cu{major}"
    named = dict.fromkeys([cpp_extension.CUDA_HOME, "/usr/local/cuda", wheels])
    homes = [Path(home) for home in named if home and home != "/usr"]
    headers = [home / "include" for home in homes if (home / "include").is_dir()]
    # The wheels' libraries come first: torch has loaded them already.
    folders = [folder for home in reversed(homes) for name in ("lib", "lib64") if (folder := home / name).is_dir()]

    def library(*names: str) -> str | None:
        within = [*(folder / "stubs" for folder in folders), *folders, Path("/usr/lib/x86_64-linux-gnu")]
        return next((str(file) for folder in within for name in names if (file := folder / name).exists()), None)

    linked = ["-lc10_cuda", "-ltorch_cuda"]
    for name in ("cudart", "cublasLt", "cublas"):
        found = library(f"lib{name}.so.{major}", f"lib{name}.so")
        if found is None:
            raise SystemExit(f"no lib{name}.so.{major} in {', '.join(map(str, homes))}: CUDA_HOME names the toolkit")
        linked.append(found)
    frontend = [Path(os.environ.get("NNTILE_CUDNN_FRONTEND", "")), wheels.parents[1] / "include"]
    cudnn = [home for home in (wheels.parent / "cudnn", *homes) if (home / "include/cudnn.h").exists()]
    shim = next((home / name for home in cudnn for name in ("lib/libcudnn.so.9", "lib64/libcudnn.so.9")
                 if (home / name).exists()), library("libcudnn.so.9"))  # fmt: skip
    for folder in frontend:
        # Without the frontend, ATen computes attention. It needs a shared libstdc++: see scripts/install.sh.
        shared = ask(*shlex.split(os.environ.get("CXX", "c++")), "-print-file-name=libstdc++.so") != "libstdc++.so"
        if (folder / "cudnn_frontend.h").exists() and cudnn and shim and shared:
            headers += [folder, cudnn[0] / "include"]
            linked.append(str(shim))
            break
    # --as-needed: the extension is linked with the driver (or a toolkit's stub of it) only if a kernel calls it.
    # Otherwise the extension must also load on machines without a GPU.
    if driver := library("libcuda.so", "libcuda.so.1"):
        linked += ["-Wl,--push-state,--as-needed", driver, "-Wl,--pop-state"]
    return ["-DNNTILE_CUDA", *(f"-isystem{path}" for path in headers)], linked, list(map(str, folders))


@functools.cache
def vector_flags(arch: str) -> list[str]:
    """Return -march, and the macros that select the same instruction set in ATen's vector headers."""
    march = f"-march={arch}"
    cxx = shlex.split(os.environ.get("CXX", "c++"))
    macros = ask(*cxx, march, "-dM", "-E", "-x", "c++", os.devnull)
    avx512 = all(f"__AVX512{part}__ 1" in macros for part in ("F", "DQ", "VL", "BW"))
    avx2 = "__AVX2__ 1" in macros and "__FMA__ 1" in macros
    capability = "AVX512" if avx512 else "AVX2" if avx2 else "DEFAULT"
    return [march, f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]


def mpi_flags(starpu: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the compiler's and the linker's flags for StarPU-MPI; none if StarPU-MPI, MPI or mpicc is missing."""
    library = Path(starpu["libdir"]) / f"lib{STARPU.replace('starpu', 'starpumpi')}.so"
    if not library.exists() or not shutil.which("mpicc"):
        return [], []
    if re.search(r"libmpi\S* => not found", ask("ldd", str(library))):
        return [], []
    flags = shlex.split(ask("mpicc", "-show"))[1:]
    headers = [flag for flag in flags if flag.startswith(("-I", "-D"))]
    return headers, [str(library), *(flag for flag in flags if flag not in headers)]


def files(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path().glob(pattern))


def grouped(sources: list[str], size: int, rank: int) -> list[str]:
    """Write files that include `size` sources each, and return these files; files with a lower rank compile first.

    Torch's headers take seconds to read; a group reads them once. If a source changes, its group is compiled again.
    """
    GROUPS.mkdir(parents=True, exist_ok=True)
    groups = []
    for start in range(0, len(sources), size):
        part = sources[start : start + size]
        group = GROUPS / f"{rank}_{Path(part[0]).name}"
        text = "".join(f'#include "{ROOT / source}"\n' for source in part)
        if not group.exists() or group.read_text() != text:
            group.write_text(text)
        groups.append(str(group.relative_to(ROOT)))
    return groups


def core_sources() -> list[str]:
    """Return the sources of nntile_py._core without CUDA."""
    runtime = [file for file in files("nntile_py/execution/csrc/*.cpp") if not file.endswith("_cuda.cpp")]
    kernels = [file for file in files("tasks/*.cpp") if not file.endswith("_cuda.cpp")]
    python = [file for file in runtime if "#include <pybind11/" in Path(file).read_text()]  # the longest compilations
    return [*grouped(python, 1, 0), *grouped(kernels, 5, 1), *grouped([f for f in runtime if f not in python], 6, 2)]


class Core(Extension):
    """nntile_py._core for one instruction set. A wheel has several, in folders such as nntile_py/_avx2."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        capability = vector_flags(arch)[-1].removeprefix("-DCPU_CAPABILITY_").lower()
        # Objects are kept, so that ninja compiles only changed files. A wheel's objects differ if torch has CUDA.
        own = arch != NATIVE or (WHEEL and torch.version.cuda)
        self.objects = ROOT / "build" / (f"ext-{arch}" if own else "ext")
        extension = cpp_extension.CppExtension(
            f"nntile_py._{capability}._core" if WHEEL else "nntile_py._core",
            core_sources(),
            include_dirs=[str(ROOT / "nntile_py" / "execution" / "csrc"), str(ROOT / "tasks"), str(ARGS)],
            depends=files("nntile_py/execution/csrc/*.h", "tasks/*.h"),
        )
        self.__dict__.update(extension.__dict__)


class Build(cpp_extension.BuildExtension):
    def build_extension(self, extension: Extension) -> None:
        self.build_temp = str(getattr(extension, "objects", ROOT / "build" / "ext"))
        super().build_extension(extension)

    def run(self) -> None:
        # Before the compilation: a source that is edited meanwhile counts as changed.
        start, sources = time.time_ns(), fingerprint(ROOT)
        starpu = find_starpu()
        macros = starpu_macros(starpu["cflags"])
        cuda = torch.version.cuda is not None and "USE_CUDA" in macros and not WHEEL
        compiled, linked, folders = cuda_flags() if cuda else ([], [], [])
        os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        # Torch's headers include pybind11's. As system headers they are exempt from our warnings.
        system = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
        flags = ["-std=c++20", "-O3", "-g0", "-fopenmp", "-Wall", "-Wextra", *system, *compiled]
        flags += ["-Werror"] if os.environ.get("NNTILE_WERROR") != "0" else []
        # GCC 12 warns of its own AVX-512 header, and of anonymous namespaces in files that a group includes.
        flags += ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-subobject-linkage"]
        flags += starpu["cflags"].replace("-I", "-isystem").split()
        # The linker gets no -fopenmp: the extension must use torch's OpenMP runtime.
        rpaths = [
            f"-Wl,-rpath,{path}" for path in dict.fromkeys([starpu["libdir"], *cpp_extension.library_paths(), *folders])
        ]
        if WHEEL:  # DT_RPATH, unlike DT_RUNPATH, is also used for dependencies of the libraries
            rpaths = ["-Wl,--disable-new-dtags", "-Wl,-rpath,$ORIGIN/../starpu/lib:$ORIGIN/../../torch/lib"]
        headers = args_headers.write(ROOT, ARGS)
        for extension in self.extensions:
            if isinstance(extension, Core):
                extension.depends += headers
                extension.sources += files("nntile_py/execution/csrc/*_cuda.cpp", "tasks/*_cuda.cpp") if cuda else []
                extension.extra_compile_args = {"cxx": [*vector_flags(extension.arch), *flags]}
                extension.extra_link_args = [*rpaths, *starpu["libs"].split(), *linked]
        mpi_headers, mpi_libraries = ([], []) if WHEEL else mpi_flags(starpu)
        mpi = self.extensions[-1]
        if mpi_libraries:
            system = [flag.replace("-I", "-isystem") for flag in mpi_headers]
            mpi.extra_compile_args = {"cxx": [*vector_flags(NATIVE), *flags, *system]}
            mpi.extra_link_args = [*mpi_libraries, *starpu["libs"].split(), f"-Wl,-rpath,{starpu['libdir']}"]
        else:
            self.extensions.remove(mpi)
        super().run()
        version = ".".join(macros[f"{part}_VERSION"] for part in ("MAJOR", "MINOR", "RELEASE"))
        info = {
            "starpu_prefix": starpu["prefix"],
            "starpu_version": version,
            "starpu_cflags": starpu["cflags"],
            "starpu_libdir": starpu["libdir"],
            "torch": torch.__version__,
            "cuda": torch.version.cuda if cuda else "",
            "mpi": " ".join(mpi_libraries),
            "arch": " ".join(vector_flags(NATIVE)),
            "sources": sources,
        }
        if WHEEL:
            within = "{package}/starpu"  # see build_info in nntile_py/system/folders.py
            info |= {"wheel": " ".join(WHEEL), "arch": "-march=native", "starpu_prefix": within}
            info |= {"starpu_cflags": f"-I{within}/include/starpu/1.4", "starpu_libdir": f"{within}/lib"}
        inside = Path("nntile_py") if self.inplace else Path(self.build_lib) / "nntile_py"
        path = inside / "_build_info.json"
        path.write_text(json.dumps(info, indent=1) + "\n")
        os.utime(path, ns=(start, start))  # see changed_sources in nntile_py/system/sources.py


def packages() -> list[str]:
    names = ["nntile_py", "nntile_py.scheduler_configs", "nntile_py.experiments"]
    names += [f"nntile_py.{name}" for name in find_packages("nntile_py")]
    for top in ("tasks", "tiles", "models"):
        names += [f"nntile_py.{top}", *(f"nntile_py.{top}.{name}" for name in find_packages(top))]
    return names


setup(
    packages=packages(),
    ext_modules=[
        *(Core(arch) for arch in WHEEL or [NATIVE]),
        Extension("nntile_py._mpi", files("nntile_py/execution/csrc/mpi/*.cpp"), language="c++"),
    ],
    cmdclass={"build_ext": Build},
)
