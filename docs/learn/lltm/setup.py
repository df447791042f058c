"""Build ``lltm._C`` with opzoo's headers: ``python setup.py build_ext --inplace``.

Environment: ``LLTM_CUDA=0`` leaves CUDA out; ``TORCH_CUDA_ARCH_LIST`` names the GPUs, 9.0a by default.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

if "CUDA_HOME" not in os.environ and Path("/usr/local/cuda/bin/nvcc").exists():
    os.environ["CUDA_HOME"] = "/usr/local/cuda"  # torch would guess, from the first nvcc on PATH

from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

os.chdir(Path(__file__).resolve().parent)

opzoo = importlib.util.find_spec("opzoo")  # found, not imported: only its headers are needed
assert opzoo is not None and opzoo.submodule_search_locations, "pip install opzoo first"
headers = Path(opzoo.submodule_search_locations[0]) / "csrc"

with_cuda = os.environ.get("LLTM_CUDA") != "0" and CUDA_HOME is not None
archs = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "9.0a") if with_cuda else ""

# [flags
common = [
    "-O3",
    "-std=c++20",
    f"-I{headers}",
    f"-DTORCH_TARGET_VERSION=0x{(2 << 56) | (10 << 48):016x}ULL",  # the C functions of torch 2.10, no newer ones
    f'-DOPZOO_CUDA_ARCHS="{archs}"',  # for a message of opzoo's check_launch
]
flags = {
    "cxx": [*common, "-g0", "-fvisibility=hidden"],
    "nvcc": [*common, "-DUSE_CUDA", "--expt-relaxed-constexpr", "-Xcompiler", "-fvisibility=hidden"],
}
# flags]

# [link
patterns = ("*.cpp", "*.cu") if with_cuda else ("*.cpp",)
sources = sorted(str(path) for pattern in patterns for path in Path("csrc").glob(pattern))
make = CUDAExtension if with_cuda else CppExtension
extension = make("lltm._C", sources, py_limited_api=True, extra_compile_args=flags)
extension.libraries = ["cudart_static", "rt", "dl", "pthread"] if with_cuda else []  # instead of torch's own list
extension.extra_link_args = [
    *("-s", "-Wl,--exclude-libs,ALL"),
    *("-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", "-ltorch_cpu"),
]
# link]

setup(
    name="lltm",
    version="0.1.0",
    packages=["lltm"],
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
