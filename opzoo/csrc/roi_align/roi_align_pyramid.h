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

  // A square box of side canonical_size belongs to canonical_level, counted from the first level;
  // twice the side is one level coarser.
  double canonical_size = 224;
  double canonical_level = 0;
};

// floor(canonical_level + log2(sqrt(area) / canonical_size) + 1e-6), cut to the levels there are. A
// box without a finite area gets level 0.
template <class acc>
OPZOO_HOST_DEVICE int level_of(const RoIAlignPyramid& pyramid, int64_t k) {
  if (pyramid.levels == 1) return 0;
  const RoIAlignParams& p = pyramid.level[0];
  const acc* box = static_cast<const acc*>(p.boxes) + k * p.boxes_stride[0];
  const int64_t step = p.boxes_stride[1];
  if (!p.batch_index) box += step;
  const acc area = multiply_rounded(box[2 * step] - box[0], box[3 * step] - box[step]);
  const acc ratio = std::sqrt(area) / static_cast<acc>(pyramid.canonical_size);
  const acc level = std::floor(static_cast<acc>(pyramid.canonical_level) + std::log2(ratio) +
                               static_cast<acc>(1e-6));
  if (!(level > acc(0))) return 0;
  const int last = pyramid.levels - 1;
  return level < static_cast<acc>(last) ? static_cast<int>(level) : last;
}

}  // namespace opzoo
