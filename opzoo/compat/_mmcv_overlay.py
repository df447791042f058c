"""``mmcv._ext``: the compiled module of mmcv, over the operators of opzoo (see ``opzoo.compat.mmcv``)."""

from opzoo.compat._mmcv_ext import *  # noqa: F403
from opzoo.compat._mmcv_ext import __getattr__  # noqa: F401
