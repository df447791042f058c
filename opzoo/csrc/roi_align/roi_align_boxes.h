// SPDX-License-Identifier: Apache-2.0
// The gradient of average RoIAlign to the boxes.
//
//   grad        [K, C, pooled_height, pooled_width]  of output, any strides
//   input       [N, C, H, W]                         any strides
//   grad_boxes  like boxes, contiguous               fp32 (fp64 for fp64); image indices get 0
//
// Sample i of bin p lies at the fraction t = (p + (i + 0.5) / grid) / bins of its axis, and so at
// (1 - t) * low + t * high of the scaled box. With the number of samples held constant
//
//   d coordinate / d low  = spatial_scale * (1 - t)
//   d coordinate / d high = spatial_scale * t
//
// or spatial_scale and 0 where the size is held at one pixel. A bilinear sample is a product of one
// tap per axis, so that along x, with the merged weights Wy and Wx of roi_align_bands.h and
// Ux[q, x] = sum over the samples of bin q of d weight / d coordinate * d coordinate / d x1,
//
//   grad_x1 = sum over c, p, q, y, x of
//             grad[c, p, q] / count * Wy[p, y] * Ux[q, x] * input[c, y, x]
//
// and likewise for the other three coordinates.
//
// The derivative at a kink is the one from the right, of growing coordinates: a sample on a pixel
// sees the next pixel, one on the last pixel sees none, a size of exactly one pixel is not held.
// Where a sample is clamped to the edge or lies outside the map, and for a box without samples, it
// is 0. A NaN or infinite pixel makes the gradient of a box NaN or infinite whose samples it
// borders. Deterministic: sums run in an order that depends on shapes alone. No torch here.
#pragma once

#include "roi_align/roi_align.h"

namespace opzoo {

// What a pixel gives to a bin, and the derivatives of that by the two edges of the box.
template <class acc>
struct EdgeWeights {
  acc weight = 0, low = 0, high = 0;
};

template <class acc>
struct EdgeEntry {
  int64_t pixel;
  EdgeWeights<acc> weights;
};

// An axis of a RoI whose edges move.
template <class acc>
struct EdgeAxis {
  RoIAxis<acc> axis;
  acc scale = 0;
  int64_t bins = 1, size = 1;  // size of the map
  bool held = false;           // at one pixel, whatever the upper edge does
};

template <class acc>
struct EdgeRoI {
  int64_t image = -1;
  EdgeAxis<acc> y, x;
};

template <class acc>
OPZOO_HOST_DEVICE EdgeAxis<acc> make_edge_axis(
    const RoIAlignParams& p, acc low, acc high, int64_t bins, int64_t size) {
  EdgeAxis<acc> edges;
  edges.axis = make_roi_axis(p, low, high, bins);
  edges.scale = static_cast<acc>(p.spatial_scale);
  edges.bins = bins;
  edges.size = size;
  const acc offset = p.aligned ? acc(0.5) : acc(0);
  const acc end = multiply_rounded(high, edges.scale) - offset;
  edges.held = !p.aligned && end - edges.axis.start < acc(1);
  return edges;
}

template <class acc>
OPZOO_HOST_DEVICE EdgeRoI<acc> read_edge_roi(const RoIAlignParams& p, int64_t k) {
  const acc* box = static_cast<const acc*>(p.boxes) + k * p.boxes_stride[0];
  const int64_t step = p.boxes_stride[1];
  if (!p.batch_index) box += step;
  EdgeRoI<acc> roi;
  roi.image = image_index<acc>(p, k);
  roi.x = make_edge_axis(p, box[0], box[2 * step], p.pooled_width, p.width);
  roi.y = make_edge_axis(p, box[step], box[3 * step], p.pooled_height, p.height);
  return roi;
}

// The pixels a bin reads, as `count` entries that each stand for themselves: one per pixel of a
// range, or two per sample where the samples are sparser than the pixels. Either way there are no
// more than the samples' range has pixels, plus one. Entries may have no weight at all.
struct EntryRange {
  bool by_pixel = false;
  int64_t first = 0;  // pixel or sample
  int64_t count = 0;
};

template <class acc>
OPZOO_HOST_DEVICE EntryRange entries_of(const EdgeAxis<acc>& edges, int64_t bin) {
  const SampleRange range = edges.axis.samples_near(bin, edges.size);
  if (range.begin >= range.end) return {};
  const acc one = edges.axis.coordinate(bin, range.begin);
  const acc other = edges.axis.coordinate(bin, range.end - 1);
  const acc low = one < other ? one : other;
  const acc high = one < other ? other : one;
  const acc last = static_cast<acc>(edges.size - 1);
  if (!(high >= acc(-1) && low <= last + acc(1))) return {};
  const int64_t first_pixel = low > acc(0) ? static_cast<int64_t>(low < last ? low : last) : 0;
  int64_t last_pixel = high >= acc(0) ? static_cast<int64_t>(high < last ? high : last) + 1 : 0;
  if (last_pixel > edges.size - 1) last_pixel = edges.size - 1;
  const int64_t pixels = last_pixel - first_pixel + 1;
  const int64_t taps = 2 * (range.end - range.begin);
  if (taps < pixels) return {false, range.begin, taps};
  return {true, first_pixel, pixels};
}

// Adds what sample i of a bin gives to a pixel, through the lower or the upper half of its tap.
template <class acc>
OPZOO_HOST_DEVICE void add_tap(const EdgeAxis<acc>& edges,
                               int64_t bin,
                               int64_t sample,
                               acc weight,
                               acc slope,
                               EdgeWeights<acc>& sum) {
  const acc grid = static_cast<acc>(edges.axis.grid);
  const acc at = (static_cast<acc>(bin) + (static_cast<acc>(sample) + acc(0.5)) / grid) /
                 static_cast<acc>(edges.bins);
  const acc by_high = edges.held ? acc(0) : at;
  sum.weight += weight / grid;
  sum.low += slope * edges.scale * (acc(1) - by_high) / grid;
  sum.high += slope * edges.scale * by_high / grid;
}

// Entry number i of entries_of(edges, bin).
template <class acc>
OPZOO_HOST_DEVICE EdgeEntry<acc> entry_at(const EdgeAxis<acc>& edges,
                                          int64_t bin,
                                          const EntryRange& entries,
                                          int64_t i) {
  if (!entries.by_pixel) {
    const int64_t sample = entries.first + i / 2;
    const auto tap = ClampBorder::tap(edges.axis.coordinate(bin, sample), edges.size);
    const bool upper = i % 2 != 0;
    EdgeEntry<acc> entry{upper ? tap.hi : tap.lo, {}};
    if (tap.inside) {
      add_tap(edges,
              bin,
              sample,
              upper ? tap.weight_hi : tap.weight_lo,
              upper ? tap.slope_hi : tap.slope_lo,
              entry.weights);
    }
    return entry;
  }
  EdgeEntry<acc> entry{entries.first + i, {}};
  const acc centre = static_cast<acc>(entry.pixel);
  const SampleRange near = edges.axis.samples_between(bin, centre - acc(1), centre + acc(1));
  for (int64_t sample = near.begin; sample < near.end; ++sample) {
    const auto tap = ClampBorder::tap(edges.axis.coordinate(bin, sample), edges.size);
    if (!tap.inside) continue;
    if (tap.lo == entry.pixel) {
      add_tap(edges, bin, sample, tap.weight_lo, tap.slope_lo, entry.weights);
    } else if (tap.hi == entry.pixel) {
      add_tap(edges, bin, sample, tap.weight_hi, tap.slope_hi, entry.weights);
    }
  }
  return entry;
}

// At least the number of entries of all bins of an axis together: neighbouring bins share two
// pixels, and a third where rounding puts a sample on the other side of one.
OPZOO_HOST_DEVICE int64_t entries_at_most(int64_t bins, int64_t size, int64_t sampling_ratio) {
  const int64_t pixels = size + 3 * bins;
  const int64_t taps = sampling_ratio > 0 ? 2 * sampling_ratio * bins : pixels;
  return taps < pixels ? taps : pixels;
}

}  // namespace opzoo
