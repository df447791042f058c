// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "multi_scale_roi_align/multi_scale_roi_align.h"
#include "roi_align/roi_align_backward_kernel.cuh"

namespace opzoo {

// What each RoI reaches in the map of `level`: nothing, where it belongs to another. One thread per
// RoI.
template <class acc>
__global__ void multi_scale_roi_align_reach_kernel(const __grid_constant__ RoIAlignPyramid pyramid,
                                                   int level,
                                                   RoIReach<acc>* reach) {
  const RoIAlignParams& p = pyramid.level[level];
  for (int64_t k = first_item(); k < p.rois; k += item_step()) {
    const RoI<acc> roi = read_roi<acc>(p, k);
    RoIReach<acc> r;
    r.y = roi.y;
    r.x = roi.x;
    r.image = level_of<acc>(pyramid, k) == level ? roi.image : -1;
    r.rows = footprint(roi.y, p.pooled_height, p.height);
    r.columns = footprint(roi.x, p.pooled_width, p.width);
    reach[k] = r;
  }
}

}  // namespace opzoo
