"""Build ``opzoo._C`` from every source below ``opzoo/csrc``.

Environment:
    OPZOO_CUDA=0|1         leave CUDA out / insist on it (default: on when nvcc is found)
    OPZOO_SANITIZE=1       compile for the CPU alone, under the address and undefined-behaviour sanitizers
    OPZOO_RELEASE=1        compile for the architectures of released wheels
    TORCH_CUDA_ARCH_LIST   compile for exactly these, e.g. "8.6;9.0a"
    CUDA_HOME, MAX_JOBS    as for any torch extension

``_C`` uses the LibTorch stable ABI and CPython's limited API, so one binary loads in every torch from
the floor version on. It links cudart statically and reaches torch's CUDA library through ``libtorch.so``
with weak symbols, so the same binary also loads in a CPU-only torch.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
os.chdir(ROOT)

MIN_PYTHON_HEX = "cp310"
# Stable-ABI target 2.10: major in the top byte, minor in the next.
TORCH_TARGET = f"0x{(2 << 56) | (10 << 48):016x}ULL"
RELEASE_ARCHS = "7.5;8.0;8.6;9.0a;10.0;12.0+PTX"
DEVELOPMENT_ARCHS = "9.0a"
# A report of either sanitizer ends the process. vptr asks for the type information of classes in torch;
# a division of floats by zero is IEEE arithmetic, which the operators define.
SANITIZE = os.environ.get("OPZOO_SANITIZE") == "1"
SANITIZERS = ["-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize=vptr", "-fno-sanitize-recover=all"]


def find_cuda_home() -> str | None:
    """The toolkit folder that holds bin/nvcc and include/, or None."""
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named and os.environ.get("OPZOO_CUDA") != "0" and not (Path(named) / "bin" / "nvcc").exists():
        sys.exit(
            f"CUDA_HOME={named} has no bin/nvcc. Install the CUDA toolkit there, set CUDA_HOME to the toolkit's\n"
            "folder or unset it; or build without CUDA: OPZOO_CUDA=0."
        )
    candidates = [named, "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        candidates.append(str(Path(nvcc).resolve().parent.parent))
    for candidate in candidates:
        if candidate and (Path(candidate) / "bin" / "nvcc").exists() and (Path(candidate) / "include").exists():
            return candidate
    return None


def want_cuda(cuda_home: str | None) -> bool:
    choice = os.environ.get("OPZOO_CUDA", "")
    if choice not in ("", "0", "1"):
        sys.exit(f"OPZOO_CUDA must be 0 or 1, got {choice!r}")
    if choice == "1" and cuda_home is None:
        sys.exit(
            "OPZOO_CUDA=1, but no nvcc was found. Install the CUDA toolkit (12.x or 13.x, matching\n"
            "torch.version.cuda in its major version) and set CUDA_HOME to its folder, the one that\n"
            "holds bin/nvcc and include/. Or build without CUDA: OPZOO_CUDA=0."
        )
    return choice != "0" and cuda_home is not None and not SANITIZE


def arch_list() -> str:
    chosen = os.environ.get("TORCH_CUDA_ARCH_LIST")
    if not chosen:
        chosen = RELEASE_ARCHS if os.environ.get("OPZOO_RELEASE") == "1" else DEVELOPMENT_ARCHS
        os.environ["TORCH_CUDA_ARCH_LIST"] = chosen
    return ";".join(chosen.replace(",", ";").split())


CUDA_HOME = find_cuda_home()
WITH_CUDA = want_cuda(CUDA_HOME)
ARCHS = arch_list() if WITH_CUDA else ""
if CUDA_HOME:
    os.environ["CUDA_HOME"] = CUDA_HOME  # torch would guess from the first nvcc on PATH, which may be a wrapper
os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, CUDAExtension
except ImportError:
    sys.exit("opzoo is compiled against an installed torch: pip install torch, then pip install --no-build-isolation .")

from setuptools import setup  # noqa: E402  (torch's BuildExtension patches distutils first)

VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "opzoo" / "_version.py").read_text()).group(1)


def extension():
    patterns = ["*.cpp", "*.cu"] if WITH_CUDA else ["*.cpp"]
    csrc = Path("opzoo") / "csrc"
    sources = sorted(str(path) for pattern in patterns for path in csrc.rglob(pattern))
    headers = sorted(str(path) for pattern in ("*.h", "*.cuh") for path in csrc.rglob(pattern))
    definitions = [
        f"-DTORCH_TARGET_VERSION={TORCH_TARGET}",
        f'-DOPZOO_VERSION="{VERSION}"',
        f'-DOPZOO_CUDA_ARCHS="{ARCHS}"',
        f'-DOPZOO_BUILD_TORCH="{torch.__version__}"',
    ]
    common = ["-O1" if SANITIZE else "-O3", "-std=c++20", "-I" + str(ROOT / csrc), *definitions]
    prefix_map = f"-ffile-prefix-map={ROOT}/="
    # No contraction: a*b+c rounds twice on every CPU, so results do not depend on the instruction set.
    host = ["-g0", "-fvisibility=hidden", "-ffp-contract=off", prefix_map]
    if SANITIZE:
        host += [*SANITIZERS, "-g1", "-fno-omit-frame-pointer"]
    flags = {"cxx": [*common, *host, "-Wall", "-Wno-unknown-pragmas"]}
    if WITH_CUDA:
        flags["cxx"].append("-DOPZOO_WITH_CUDA")
        flags["nvcc"] = [
            *common,
            "-DUSE_CUDA",
            "-DOPZOO_WITH_CUDA",
            "--expt-relaxed-constexpr",
            "-lineinfo",
            "-Xcompiler",
            ",".join(host),
        ]
    make = CUDAExtension if WITH_CUDA else CppExtension
    ext = make("opzoo._C", sources, depends=headers, py_limited_api=True, extra_compile_args=flags)
    shared_by_torch = {"cudart", "c10_cuda", "torch_cuda", "torch", "torch_cpu", "torch_python", "c10"}
    ext.libraries = [name for name in ext.libraries if name not in shared_by_torch]
    if WITH_CUDA:
        ext.libraries += ["cudart_static", "rt", "dl", "pthread"]
    ext.extra_link_args = [
        *(SANITIZERS if SANITIZE else ["-s"]),
        "-Wl,--as-needed",
        "-Wl,--exclude-libs,ALL",
        f"-Wl,--version-script={csrc / 'module.map'}",
        # The umbrella library: it pulls in torch's CUDA half exactly where there is one.
        "-Wl,--no-as-needed",
        "-ltorch",
        "-Wl,--as-needed",
        "-ltorch_cpu",
    ]
    return ext


setup(
    version=VERSION,
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": MIN_PYTHON_HEX}},
)
