"""Other libraries to compare with. A test file that takes one from here is skipped where it is missing."""

from __future__ import annotations

import pytest

torchvision = pytest.importorskip("torchvision", reason="needs torchvision")
