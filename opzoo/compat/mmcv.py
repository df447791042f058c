"""mmcv's compiled module for mmcv-lite: ``import opzoo.compat.mmcv`` and ``mmcv.ops`` works.

mmcv-lite holds every Python file of mmcv and lacks one module, the compiled ``mmcv._ext``. Importing
this module makes ``import mmcv._ext`` find one whose functions are opzoo's operators. A compiled
``mmcv._ext`` that is already installed wins. Import this before ``mmcv.ops``, ``mmdet`` or anything
that imports them; where no line of a script may change, install the distribution ``opzoo-mmcv``, which
lays the same module beside mmcv-lite as a file.

``covered()`` lists the functions that compute; the others import and raise NotImplementedError when
they are called.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from opzoo.compat import _mmcv_ext

_NAME = "mmcv._ext"


def covered() -> tuple[str, ...]:
    """Names of the functions of ``mmcv._ext`` that opzoo provides."""
    return _mmcv_ext.covered()


def installed() -> bool:
    """Whether ``mmcv._ext`` is opzoo's; False where a compiled one is found first, or no mmcv at all."""
    try:
        spec = importlib.util.find_spec(_NAME)
    except ModuleNotFoundError:
        return False
    return spec is not None and spec.origin is not None and _holds_opzoo(Path(spec.origin))


def _holds_opzoo(origin: Path) -> bool:
    return origin.suffix == ".py" and "opzoo.compat" in origin.read_text(encoding="utf-8")


class _Finder:
    """Answers for ``mmcv._ext`` alone, after every other finder."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _NAME:
            return None
        return importlib.util.spec_from_file_location(name, Path(__file__).with_name("_mmcv_overlay.py"))


def _restore_find_loader() -> None:
    """Python 3.14 removed what mmcv and mmengine ask for the compiled module."""
    if hasattr(pkgutil, "find_loader"):
        return

    def find_loader(name: str) -> Any:
        spec = importlib.util.find_spec(name)
        return None if spec is None else spec.loader

    pkgutil.find_loader = find_loader  # type: ignore[assignment]


if not any(finder is _Finder for finder in sys.meta_path):
    sys.meta_path.append(_Finder)
_restore_find_loader()
