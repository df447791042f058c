"""Other objects under the names that a project's loaded modules hold."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def rebind(packages: tuple[str, ...], instead: Mapping[Any, Any]) -> None:
    """In every loaded module of ``packages``, replace each attribute that is a key by its value."""
    by_id = {id(old): new for old, new in instead.items()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            for attribute, value in list(vars(module).items()):
                if id(value) in by_id:
                    setattr(module, attribute, by_id[id(value)])
