// SPDX-License-Identifier: Apache-2.0
// roi_align: pools a window of a feature map, given by a box in image coordinates, to a fixed size.
//
//   input        [N, C, H, W]  the feature map, any strides, fp64, fp32, fp16 or bf16
//   boxes        [K, 5]        (image index, x1, y1, x2, y2) in image pixels, any strides
//   batch_index  [K]           optional int64 image indices; boxes is [K, 4] then
//   output       [K, C, pooled_height, pooled_width], input's dtype; channels_last if input is
//
// Per axis, with s = spatial_scale and P bins along the axis:
//   start = x1 * s - offset     offset = 0.5 if aligned, else 0
//   size  = (x2 * s - offset) - start, at least 1 unless aligned
//   bin   = size / P
//   grid  = sampling_ratio if positive, else ceil(bin), never negative
//   sample i of bin p lies at  start + p * bin + (i + 0.5) * bin / grid
// A sample is read bilinearly with ClampBorder: inside [-1, H] x [-1, W] it counts, elsewhere it
// has the value 0.
//   average   sum of the grid_h * grid_w samples / max(grid_h * grid_w, 1)
//   maximum   the largest sample, the first of equals; NaN beats every number; 0 without samples.
//             argmax is iy * grid_w + ix, or -1 where a sample outside the map won or there is none
//
// Edges, the same on every device, forward and backward:
//   a box with a NaN or infinite coordinate (also after scaling) has no samples: zeros
//   an inverted or empty box, aligned: an adaptive grid has no samples; a fixed one is mirrored
//   an adaptive bin of more than 2^30 samples along an axis has none
//   an image index that is no integer in [0, N): an error on the CPU; on CUDA zeros, nothing is
//   read an argmax that is no sample of its bin: as -1
//   a NaN or infinite pixel reaches the averages that give it a weight other than 0
//
// Coordinates, weights and sums are fp32 (fp64 for fp64), half types are rounded once. Forward
// and backward are deterministic: no sum depends on the order in which threads arrive. No torch
// here.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/bilinear.h"
#include "common/rounding.h"
#include "common/types.h"

namespace opzoo {

constexpr int64_t kMaxSamplingRatio = 32767;
constexpr int64_t kMaxAdaptiveGrid = int64_t{1} << 30;

// The axes of a [N, C, H, W] map and of a [K, C, pooled_height, pooled_width] result.
enum RoIAlignAxis { kRoIBatch = 0, kRoIChannel = 1, kRoIRow = 2, kRoIColumn = 3 };

struct RoIAlignParams {
  int64_t batch = 0, channels = 0, height = 0, width = 0;
  int64_t rois = 0, pooled_height = 0, pooled_width = 0;

  const void* boxes = nullptr;           // acc_t of the features
  int64_t boxes_stride[2] = {};          // RoI, coordinate
  const int64_t* batch_index = nullptr;  // null: column 0 of boxes
  int64_t batch_index_stride = 0;

  double spatial_scale = 1;
  int64_t sampling_ratio = -1;
  bool aligned = false;

  int64_t map_stride[4] = {};     // input or grad_input
  int64_t pooled_stride[4] = {};  // output or grad
  int64_t argmax_stride[4] = {};
};

struct SampleRange {
  int64_t begin, end;
};

// A RoI along one axis.
template <class acc>
struct RoIAxis {
  acc start = 0, bin = 0;
  int64_t grid = 0;  // samples per bin

  OPZOO_HOST_DEVICE acc coordinate(int64_t pooled, int64_t sample) const {
    const acc bin_start = start + multiply_rounded(static_cast<acc>(pooled), bin);
    return bin_start +
           multiply_rounded(static_cast<acc>(sample) + acc(0.5), bin) / static_cast<acc>(grid);
  }

  // The samples inside [-1, size], and possibly some outside.
  OPZOO_HOST_DEVICE SampleRange samples_near(int64_t pooled, int64_t size) const {
    return samples_between(pooled, acc(-1), static_cast<acc>(size));
  }

  // A range of samples that leaves out none inside [low, high]. Every operation in coordinate() is
  // monotone in the sample, rounding included, so the two ends can be bisected exactly: a bin of a
  // million pixels costs 40 evaluations and the few samples that hit.
  OPZOO_HOST_DEVICE SampleRange samples_between(int64_t pooled, acc low, acc high) const {
    constexpr int64_t kBisectFrom = 8;
    if (grid < kBisectFrom) return {0, grid};
    SampleRange range;
    if (bin >= acc(0)) {
      range.begin = first_sample([&](int64_t i) { return coordinate(pooled, i) >= low; });
      range.end = first_sample([&](int64_t i) { return coordinate(pooled, i) > high; });
    } else {
      range.begin = first_sample([&](int64_t i) { return coordinate(pooled, i) <= high; });
      range.end = first_sample([&](int64_t i) { return coordinate(pooled, i) < low; });
    }
    return range;
  }

 private:
  // The first sample for which a predicate holds that holds for every later one; grid if none.
  template <class Predicate>
  OPZOO_HOST_DEVICE int64_t first_sample(const Predicate& holds) const {
    int64_t low = 0;
    int64_t high = grid;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (holds(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

template <class acc>
struct RoI {
  int64_t image = -1;  // -1: the image index is none of the batch
  RoIAxis<acc> y, x;

  OPZOO_HOST_DEVICE int64_t samples() const { return y.grid * x.grid; }
  OPZOO_HOST_DEVICE acc count() const {
    return samples() > 0 ? static_cast<acc>(samples()) : acc(1);
  }
};

template <class acc>
OPZOO_HOST_DEVICE RoIAxis<acc> make_roi_axis(const RoIAlignParams& p,
                                             acc low,
                                             acc high,
                                             int64_t bins) {
  const acc scale = static_cast<acc>(p.spatial_scale);
  const acc offset = p.aligned ? acc(0.5) : acc(0);
  RoIAxis<acc> axis;
  axis.start = multiply_rounded(low, scale) - offset;
  acc size = (multiply_rounded(high, scale) - offset) - axis.start;
  if (!(size - size == acc(0))) return axis;  // NaN or infinite at either end
  if (!p.aligned && size < acc(1)) size = acc(1);
  axis.bin = size / static_cast<acc>(bins);
  if (p.sampling_ratio > 0) {
    axis.grid = p.sampling_ratio;
    return axis;
  }
  const acc adaptive = std::ceil(axis.bin);
  if (adaptive > acc(0) && adaptive <= static_cast<acc>(kMaxAdaptiveGrid)) {
    axis.grid = static_cast<int64_t>(adaptive);
  }
  return axis;
}

// The image of RoI k, or -1 where the index is NaN, fractional or out of range.
template <class acc>
OPZOO_HOST_DEVICE int64_t image_index(const RoIAlignParams& p, int64_t k) {
  int64_t image;
  if (p.batch_index) {
    image = p.batch_index[k * p.batch_index_stride];
  } else {
    const acc value = static_cast<const acc*>(p.boxes)[k * p.boxes_stride[0]];
    if (!(value >= acc(0) && value < acc(int64_t{1} << 62))) return -1;
    image = static_cast<int64_t>(value);
    if (static_cast<acc>(image) != value) return -1;
  }
  return image >= 0 && image < p.batch ? image : -1;
}

template <class acc>
OPZOO_HOST_DEVICE RoI<acc> read_roi(const RoIAlignParams& p, int64_t k) {
  const acc* box = static_cast<const acc*>(p.boxes) + k * p.boxes_stride[0];
  const int64_t step = p.boxes_stride[1];
  if (!p.batch_index) box += step;
  RoI<acc> roi;
  roi.image = image_index<acc>(p, k);
  roi.x = make_roi_axis(p, box[0], box[2 * step], p.pooled_width);
  roi.y = make_roi_axis(p, box[step], box[3 * step], p.pooled_height);
  return roi;
}

// Four pixels of one [H, W] plane and their weights.
template <class acc>
struct PlaneTap {
  int64_t offset[4];
  acc weight[4];
};

template <class acc>
OPZOO_HOST_DEVICE PlaneTap<acc> plane_tap(const RoIAlignParams& p,
                                          const AxisTap<acc>& y,
                                          const AxisTap<acc>& x) {
  const int64_t row = p.map_stride[kRoIRow];
  const int64_t column = p.map_stride[kRoIColumn];
  return {{y.lo * row + x.lo * column,
           y.lo * row + x.hi * column,
           y.hi * row + x.lo * column,
           y.hi * row + x.hi * column},
          {y.weight_lo * x.weight_lo,
           y.weight_lo * x.weight_hi,
           y.weight_hi * x.weight_lo,
           y.weight_hi * x.weight_hi}};
}

template <class T, class acc>
OPZOO_HOST_DEVICE acc value_at(const T* plane, const PlaneTap<acc>& tap) {
  return tap.weight[0] * static_cast<acc>(plane[tap.offset[0]]) +
         tap.weight[1] * static_cast<acc>(plane[tap.offset[1]]) +
         tap.weight[2] * static_cast<acc>(plane[tap.offset[2]]) +
         tap.weight[3] * static_cast<acc>(plane[tap.offset[3]]);
}

// The samples of bin (ph, pw) in order: inside(tap, sample number) for each one inside the map,
// outside() at least once wherever one or more outside come next.
template <class acc, class Inside, class Outside>
OPZOO_HOST_DEVICE void visit_bin(const RoIAlignParams& p,
                                 const RoI<acc>& roi,
                                 int64_t ph,
                                 int64_t pw,
                                 const Inside& inside,
                                 const Outside& outside) {
  if (roi.samples() == 0) return;
  const SampleRange rows = roi.y.samples_near(ph, p.height);
  const SampleRange columns = roi.x.samples_near(pw, p.width);
  if (rows.begin > 0) outside();
  for (int64_t iy = rows.begin; iy < rows.end; ++iy) {
    const auto y = ClampBorder::tap(roi.y.coordinate(ph, iy), p.height);
    if (!y.inside || columns.begin > 0) outside();
    if (!y.inside) continue;
    for (int64_t ix = columns.begin; ix < columns.end; ++ix) {
      const auto x = ClampBorder::tap(roi.x.coordinate(pw, ix), p.width);
      if (x.inside) {
        inside(plane_tap(p, y, x), iy * roi.x.grid + ix);
      } else {
        outside();
      }
    }
    if (columns.end < roi.x.grid) outside();
  }
  if (rows.end < roi.y.grid) outside();
}

// The tap of one sample by its number. False where there is no such sample inside the map.
template <class acc>
OPZOO_HOST_DEVICE bool tap_of_sample(const RoIAlignParams& p,
                                     const RoI<acc>& roi,
                                     int64_t ph,
                                     int64_t pw,
                                     int64_t sample,
                                     PlaneTap<acc>& tap) {
  if (sample < 0 || sample >= roi.samples()) return false;
  const auto y = ClampBorder::tap(roi.y.coordinate(ph, sample / roi.x.grid), p.height);
  const auto x = ClampBorder::tap(roi.x.coordinate(pw, sample % roi.x.grid), p.width);
  if (!y.inside || !x.inside) return false;
  tap = plane_tap(p, y, x);
  return true;
}

// The running maximum of a bin. The value of no sample is 0.
template <class acc>
struct BinMaximum {
  acc value = 0;
  int64_t argmax = -1;
  bool any = false;

  OPZOO_HOST_DEVICE void offer(acc candidate, int64_t sample) {
    const bool first_nan = candidate != candidate && value == value;
    if (any && !(candidate > value) && !first_nan) return;
    value = candidate;
    argmax = sample;
    any = true;
  }
};

}  // namespace opzoo
