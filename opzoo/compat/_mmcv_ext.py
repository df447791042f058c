"""The functions of ``mmcv._ext``, by mmcv's names and argument names, over the operators of opzoo.

mmcv calls them below autograd, from its own ``autograd.Function``s, with results allocated beforehand;
each function computes its result and copies it there. Arguments that only mmcv's own kernels need
(``columns``, ``ones``, ``im2col_step``) are taken and not looked at. ``d`` is mmcv's name for the stride,
``W`` comes before ``H``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from opzoo._library import build_info
from opzoo.compat import _mmcv_boxes, _mmcv_layers, _mmcv_losses, _mmcv_norm


def get_compiler_version() -> str:
    """The compiler that built opzoo."""
    return str(build_info()["compiler"])


def get_compiling_cuda_version() -> str:
    """The CUDA toolkit that built opzoo."""
    return str(build_info()["cuda"] or "not available")


def _functions(*modules: ModuleType) -> dict[str, Callable[..., Any]]:
    """The public functions that these modules define."""
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }


_COVERED = {
    **_functions(_mmcv_boxes, _mmcv_layers, _mmcv_losses, _mmcv_norm),
    "get_compiler_version": get_compiler_version,
    "get_compiling_cuda_version": get_compiling_cuda_version,
}
globals().update(_COVERED)
__all__ = list(_COVERED)

# The rest of what mmcv 2.0 to 2.2 asks of its compiled module when it is imported.
_NAMES = """
active_rotated_filter_backward active_rotated_filter_forward assign_score_withk_backward
assign_score_withk_forward ball_query_forward bbox_overlaps bezier_align_backward bezier_align_forward
bias_act border_align_backward border_align_forward box_iou_quadri box_iou_rotated
chamfer_distance_backward chamfer_distance_forward contour_expand convex_giou convex_iou
correlation_backward correlation_forward diff_iou_rotated_sort_vertices_forward
dynamic_point_to_voxel_backward dynamic_point_to_voxel_forward dynamic_voxelize_forward filtered_lrelu
filtered_lrelu_act_ furthest_point_sampling_forward furthest_point_sampling_with_dist_forward
fused_bias_leakyrelu fused_indice_conv_forward gather_points_backward gather_points_forward
get_indice_pairs_2d_backward get_indice_pairs_2d_forward get_indice_pairs_3d_backward
get_indice_pairs_3d_forward get_indice_pairs_4d_forward group_points_backward group_points_forward
hard_voxelize_forward indice_conv_backward indice_conv_forward indice_maxpool_backward
indice_maxpool_forward iou3d_boxes_overlap_bev_forward iou3d_nms3d_forward iou3d_nms3d_normal_forward
knn_forward min_area_polygons nms_quadri nms_rotated pixel_group points_in_boxes_all_forward
points_in_boxes_cpu_forward points_in_boxes_part_forward points_in_polygons_forward
prroi_pool_backward prroi_pool_coor_backward prroi_pool_forward psamask_backward psamask_forward
riroi_align_rotated_backward riroi_align_rotated_forward roi_align_rotated_backward
roi_align_rotated_forward roiaware_pool3d_backward roiaware_pool3d_forward roipoint_pool3d_forward
rotated_feature_align_backward rotated_feature_align_forward stack_ball_query_forward
stack_group_points_backward stack_group_points_forward
three_interpolate_backward three_interpolate_forward three_nn_forward tin_shift_backward tin_shift_forward upfirdn2d
"""
_UNCOVERED = frozenset(_NAMES.split()) - _COVERED.keys()


def covered() -> tuple[str, ...]:
    """Names of the functions that compute."""
    return tuple(sorted(_COVERED))


def _refuse(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise NotImplementedError(
        f"mmcv._ext.{name} is not among the functions that opzoo provides: {', '.join(covered())}. "
        "A compiled mmcv has it."
    )


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name in _UNCOVERED:
        return functools.partial(_refuse, name)
    raise AttributeError(f"module 'mmcv._ext' has no attribute {name!r}")
