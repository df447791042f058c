// SPDX-License-Identifier: Apache-2.0
// Several feature maps of the same images, coarser from level to level, of which each RoI takes the
// one that suits its size (Lin et al., Feature Pyramid Networks, eq. 1). roi_align is the case of
// one level. No torch in this file.
#pragma once

#include "roi_align/roi_align.h"

namespace opzoo {

constexpr int kMaxLevels = 8;

struct RoIAlignPyramid {
  int levels = 1;
  // One per level; RoIs, pooled size and channels are the same in all of them.
  RoIAlignParams level[kMaxLevels];
  void* map[kMaxLevels] = {};  // input or grad_input of each level

  // A square box of side canonical_size belongs to canonical_level, one of twice the side to the
  // next. min_level is the first map's; levels beyond [min_level, max_level] are cut to it.
  double canonical_size = 224;
  double canonical_level = 4;
  int64_t min_level = 0, max_level = 0;
};

// The map of RoI k: floor(canonical_level + log2(sqrt(area) / canonical_size) + 1e-6), cut, counted
// from the first map. -1 where there is none: an area that is NaN or negative, or a level past the
// last map. Such a RoI has no samples. Level by level as torchvision rounds it, on every device.
template <class acc>
OPZOO_HOST_DEVICE int level_of(const RoIAlignPyramid& pyramid, int64_t k) {
  if (pyramid.levels == 1) return 0;
  const RoIAlignParams& p = pyramid.level[0];
  const acc* box = static_cast<const acc*>(p.boxes) + k * p.boxes_stride[0];
  const int64_t step = p.boxes_stride[1];
  if (!p.batch_index) box += step;
  const acc area = multiply_rounded(box[2 * step] - box[0], box[3 * step] - box[step]);
  const acc ratio = divide_rounded(std::sqrt(area), static_cast<acc>(pyramid.canonical_size));
  acc level = std::floor(static_cast<acc>(pyramid.canonical_level) + std::log2(ratio) +
                         static_cast<acc>(1e-6));
  const acc low = static_cast<acc>(pyramid.min_level);
  const acc high = static_cast<acc>(pyramid.max_level);
  if (level < low) level = low;
  if (level > high) level = high;
  level -= low;
  return level >= acc(0) && level < static_cast<acc>(pyramid.levels) ? static_cast<int>(level) : -1;
}

}  // namespace opzoo
