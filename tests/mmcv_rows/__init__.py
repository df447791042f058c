"""Every function of ``mmcv._ext`` that opzoo covers, as a table: ``ROWS``."""

from mmcv_rows import boxes, layers, losses, norm  # noqa: F401
from mmcv_rows.row import ROWS, Call, Row

__all__ = ["ROWS", "Call", "Row"]
