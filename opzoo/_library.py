"""Loads ``opzoo._C`` and turns a failed load into a message that says what to do.

The only importer of the compiled extension. Importing ``_C`` registers ``torch.ops.opzoo.*``; the
module itself is empty.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from typing import Any, cast

import torch

from opzoo._diagnosis import MIN_TORCH, release_of


def _require_torch() -> None:
    """An older torch may load ``_C`` and then fail anywhere."""
    release = release_of(torch.__version__)
    if release is not None and release < MIN_TORCH:
        raise ImportError(f"opzoo needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, found {torch.__version__}.")


def _advice(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            "The compiled part of opzoo is missing: this looks like a source checkout that was not built. "
            "Run `pip install --no-build-isolation -e .` in it, or `make build`."
        )
    return (
        "The compiled part of opzoo does not load in this environment. "
        "`python -m opzoo.info` prints what is installed and what it was built for."
    )


_require_torch()
try:
    importlib.import_module("opzoo._C")
except ImportError as error:
    raise ImportError(f"{_advice(error)} ({error})") from error


def build_info() -> dict[str, Any]:
    """How ``_C`` was built: version, CUDA or not, architectures, compiler, torch headers."""
    return cast("dict[str, Any]", json.loads(torch.ops.opzoo._build_info()))


def set_debug(enabled: bool) -> None:
    """Turn checks that need a device synchronisation on or off (off at start).

    On CUDA an image index outside the batch is skipped: the kernel reads nothing and its result is
    zero. In debug mode the same call waits for the device and raises.
    """
    torch.ops.opzoo._set_debug(bool(enabled))


# Python-side registrations (fake, autograd, autocast) hang on this handle for the life of the process.
LIBRARY = torch.library.Library("opzoo", "IMPL")


def _explain_missing_cuda(name: str) -> Callable[..., Any]:
    def kernel(*args: Any) -> Any:
        raise RuntimeError(
            f"opzoo::{name}: got CUDA tensors, but this build of opzoo holds CPU kernels only. "
            "Install a wheel with CUDA, or build from source with the CUDA toolkit installed: "
            "OPZOO_CUDA=1 pip install --no-build-isolation ."
        )

    return kernel


def _register_missing_cuda() -> None:
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        if namespace == "opzoo" and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CPU"):
            LIBRARY.impl(name, _explain_missing_cuda(name), "CUDA")


if not build_info()["cuda"]:
    _register_missing_cuda()
