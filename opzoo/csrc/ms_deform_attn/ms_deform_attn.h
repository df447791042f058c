// SPDX-License-Identifier: Apache-2.0
// Multi-scale deformable attention:
//
//   out[b, q, m, :] = sum over levels l and points p of
//                     weights[b, q, m, l, p] * sample(value[b, level l, m, :], locations[b, q, m,
//                     l, p])
//
//   value      [B, S, M, D]: B items, S pixels of all levels, M heads, D channels
//   shapes     [L, 2] int64, (height, width) of each level
//   starts     [L] int64, the level's first pixel; it holds height * width of them, row by row
//   locations  [B, Q, M, L, P, 2], (x, y): 0 is the left or upper edge of the map, 1 the other edge
//   weights    [B, Q, M, L, P]
//   out        [B, Q, M * D]
//
// A location is pixel x * width - 0.5, y * height - 0.5; sampling is bilinear and pixels outside
// are zero (ZeroBorder of common/bilinear.h). A level that does not lie inside the S pixels
// contributes nothing; on the CPU it is an error. Locations and weights are fp32 also where value
// is half; sums are fp32 (fp64 for fp64). All tensors contiguous here. No torch.
//
// Source: Zhu et al., "Deformable DETR", ICLR 2021, equation 3.
#pragma once

#include "common/bilinear.h"

namespace opzoo {

struct MsDeformAttnParams {
  const void* value = nullptr;
  const int64_t* shapes = nullptr;
  const int64_t* starts = nullptr;
  const void* locations = nullptr;
  const void* weights = nullptr;
  const void* grad = nullptr;  // of out; null in the forward
  void* out = nullptr;
  void* grad_value = nullptr;      // fp32, or fp64 for fp64, zeros at first; null if not wanted
  void* grad_locations = nullptr;  // as locations
  void* grad_weights = nullptr;    // as weights
  int64_t B = 0, S = 0, M = 0, D = 0, Q = 0, L = 0, P = 0;

  OPZOO_HOST_DEVICE int64_t samples() const { return L * P; }  // of one query and head
};

struct AttnLevel {
  int64_t height = 0, width = 0, start = 0;
};

// Level l; empty where shapes and starts name pixels that value does not have.
OPZOO_HOST_DEVICE AttnLevel attn_level(const MsDeformAttnParams& p, int64_t l) {
  AttnLevel level{p.shapes[2 * l], p.shapes[2 * l + 1], p.starts[l]};
  const bool inside = level.height > 0 && level.width > 0 && level.start >= 0 &&
                      level.start < p.S && level.width <= p.S &&
                      level.height <= (p.S - level.start) / level.width;
  return inside ? level : AttnLevel{};
}

// Four pixels, by number among the S, and what one sample takes of each: the bilinear weight and
// its slopes along x and y, in pixels.
template <class acc>
struct AttnSample {
  bool inside = false;
  int64_t pixel[4] = {};
  acc weight[4] = {};
  acc slope_x[4] = {};
  acc slope_y[4] = {};
};

template <class acc>
OPZOO_HOST_DEVICE AttnSample<acc> attn_sample(const AttnLevel& level, acc x, acc y) {
  AttnSample<acc> sample;
  if (level.height == 0) return sample;
  const auto across =
      ZeroBorder::tap<acc>(x * static_cast<acc>(level.width) - acc(0.5), level.width);
  const auto down =
      ZeroBorder::tap<acc>(y * static_cast<acc>(level.height) - acc(0.5), level.height);
  sample.inside = across.inside && down.inside;
  if (!sample.inside) return sample;
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int corner = 0; corner < 4; ++corner) {
    const bool low_y = corner < 2, low_x = corner % 2 == 0;
    const int64_t row = low_y ? down.lo : down.hi;
    const acc weight_y = low_y ? down.weight_lo : down.weight_hi;
    const acc weight_x = low_x ? across.weight_lo : across.weight_hi;
    sample.pixel[corner] = level.start + row * level.width + (low_x ? across.lo : across.hi);
    sample.weight[corner] = weight_y * weight_x;
    sample.slope_x[corner] = weight_y * (low_x ? across.slope_lo : across.slope_hi);
    sample.slope_y[corner] = (low_y ? down.slope_lo : down.slope_hi) * weight_x;
  }
  return sample;
}

}  // namespace opzoo
