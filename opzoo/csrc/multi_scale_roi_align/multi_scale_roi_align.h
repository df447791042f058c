// SPDX-License-Identifier: Apache-2.0
// multi_scale_roi_align: average RoIAlign over a pyramid, every RoI from the map that suits its
// size (Lin et al., Feature Pyramid Networks, eq. 1).
//
//   inputs          1 to 8 maps [N, C, H, W] with N, C, dtype and device in common, any strides
//   boxes           [K, 5] or [K, 4] with batch_index [K], as in roi_align.h
//   spatial_scales  map pixels per image pixel, one per map
//   output          [K, C, pooled_height, pooled_width], the maps' dtype; channels_last if the
//   first
//                   map is, and so are the gradients
//
// With several maps RoI k takes number
//   level = floor(canonical_level + log2(sqrt(area) / canonical_scale) + 1e-6)
// of them, area = (x2 - x1) * (y2 - y1) in image pixels, cut to [min_level, max_level] and counted
// from min_level (level_of in roi_align_pyramid.h). From there on it is roi_align, edges included.
//
// Edges of the level: of an area of 0 the first map, of an infinite one the last. A RoI has zeros
// and no gradient where the area is NaN or negative, and where level names no map (max_level may
// lie beyond the last one). Boxes are allowed only where every map has pixels.
//
// The level is chosen in acc_t, fp32 (fp64 for fp64), each operation rounded on its own: the levels
// of torchvision, on every device. Everything else as in roi_align.h: no half coordinates, one
// rounding, and sums whose order is fixed, forward and backward.
#pragma once

#include "roi_align/roi_align_pyramid.h"

namespace opzoo {

// The maps' own error names, "inputs[0]" to "inputs[7]", need no allocation.
constexpr const char* kInputNames[kMaxLevels] = {"inputs[0]",
                                                 "inputs[1]",
                                                 "inputs[2]",
                                                 "inputs[3]",
                                                 "inputs[4]",
                                                 "inputs[5]",
                                                 "inputs[6]",
                                                 "inputs[7]"};

}  // namespace opzoo
