// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "multi_scale_roi_align/multi_scale_roi_align.h"
#include "roi_align/roi_align_backward_kernel.cuh"
#include "roi_align/roi_align_kernel.cuh"

namespace opzoo {

// roi_align_average_kernel with the map looked up per RoI: one thread per output element, in the
// order of the output's memory. A RoI without a level or an image writes zeros and reads nothing.
template <class T, bool kChannelsLast>
__global__ void multi_scale_roi_align_average_kernel(
    const __grid_constant__ RoIAlignPyramid pyramid, T* output) {
  using acc = acc_t<T>;
  const int64_t items = pooled_items(pyramid.level[0]);
  for (int64_t i = first_item(); i < items; i += item_step()) {
    const PooledIndex at = pooled_index<kChannelsLast>(pyramid.level[0], i);
    const int level = level_of<acc>(pyramid, at.k);
    acc average = 0;
    if (level >= 0) {
      const RoIAlignParams& p = pyramid.level[level];
      const RoI<acc> roi = read_roi<acc>(p, at.k);
      if (roi.image >= 0) {
        const T* plane = static_cast<const T*>(pyramid.map[level]) + plane_at(p, roi.image, at.c);
        const auto inside = [&](const PlaneTap<acc>& tap, int64_t) {
          average += value_at(plane, tap);
        };
        visit_bin(p, roi, at.ph, at.pw, inside, [] {});
        average /= roi.count();
      }
    }
    output[i] = static_cast<T>(average);
  }
}

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
