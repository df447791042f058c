// SPDX-License-Identifier: Apache-2.0
// RoIAlign is separable. The samples of a bin form a grid, and a bilinear sample is a product of
// one tap per axis, so with Wy[p, y] the summed weights that the samples of bin row p give to map
// row y:
//
//   output[c, p, q]      = 1 / count * sum over y, x of Wy[p, y] * Wx[q, x] * input[c, y, x]
//   grad_input[c, y, x]  = 1 / count * sum over p, q of Wy[p, y] * Wx[q, x] * grad[c, p, q]
//
// exactly: clamping and the test for being inside the map are per axis as well. Wy and Wx are
// banded: a bin touches at most min(2 * grid, its pixels + 2) of them. No torch in this file.
#pragma once

#include "roi_align/roi_align.h"

namespace opzoo {

// A row of W as emit(pixel, weight), pixels ascending, each once. tap_of(n) for n in [0, samples)
// are the AxisTaps of the bin's samples, in ascending order of their coordinates.
template <class acc, class TapOf, class Emit>
OPZOO_HOST_DEVICE void merge_taps(int64_t samples, const TapOf& tap_of, const Emit& emit) {
  int64_t pixel = -1;  // the pixel whose weight is still open, and the one after it
  acc weight = 0;
  acc next_weight = 0;
  const auto flush = [&] {
    if (pixel < 0) return;
    emit(pixel, weight);
    if (next_weight != acc(0)) emit(pixel + 1, next_weight);
  };
  for (int64_t n = 0; n < samples; ++n) {
    const AxisTap<acc> tap = tap_of(n);
    if (!tap.inside) continue;
    if (tap.lo == pixel) {
      weight += tap.weight_lo;
      next_weight += tap.weight_hi;
      continue;
    }
    if (pixel >= 0 && tap.lo == pixel + 1) {
      emit(pixel, weight);
      weight = next_weight + tap.weight_lo;
    } else {
      flush();
      weight = tap.weight_lo;
    }
    pixel = tap.lo;
    next_weight = tap.weight_hi;
  }
  flush();
}

// Row `bin` of W.
template <class acc, class Emit>
OPZOO_HOST_DEVICE void merge_samples(const RoIAxis<acc>& axis,
                                     int64_t bin,
                                     int64_t size,
                                     const Emit& emit) {
  const SampleRange range = axis.samples_near(bin, size);
  const auto tap_of = [&](int64_t n) {
    const int64_t sample = axis.bin >= acc(0) ? range.begin + n : range.end - 1 - n;
    return ClampBorder::tap(axis.coordinate(bin, sample), size);
  };
  merge_taps<acc>(range.end - range.begin, tap_of, emit);
}

// One element of W, by the few samples next to the pixel: each gives what is left of 1 after its
// distance, measured from where clamping puts it.
template <class acc>
OPZOO_HOST_DEVICE acc
weight_of(const RoIAxis<acc>& axis, int64_t bin, int64_t pixel, int64_t size) {
  const acc centre = static_cast<acc>(pixel);
  const acc last = static_cast<acc>(size - 1);
  const SampleRange range = axis.samples_between(bin, centre - acc(1), centre + acc(1));
  acc weight = 0;
  for (int64_t sample = range.begin; sample < range.end; ++sample) {
    acc at = axis.coordinate(bin, sample);
    if (!(at >= acc(-1) && at <= static_cast<acc>(size))) continue;
    at = at < acc(0) ? acc(0) : at > last ? last : at;
    const acc rest = acc(1) - (at < centre ? centre - at : at - centre);
    if (rest > acc(0)) weight += rest;
  }
  return weight;
}

// Whether bin has a sample that can give weight to a pixel of [first, last].
template <class acc>
OPZOO_HOST_DEVICE bool touches(const RoIAxis<acc>& axis, int64_t bin, int64_t first, int64_t last) {
  if (axis.grid == 0) return false;
  const acc one = axis.coordinate(bin, 0);
  const acc other = axis.coordinate(bin, axis.grid - 1);
  const acc low = one < other ? one : other;
  const acc high = one < other ? other : one;
  return high >= static_cast<acc>(first - 1) && low <= static_cast<acc>(last + 1);
}

// The pixels an axis can give weight to: [first, last], empty when first > last.
struct PixelRange {
  int64_t first = 0, last = -1;
};

template <class acc>
OPZOO_HOST_DEVICE PixelRange footprint(const RoIAxis<acc>& axis, int64_t bins, int64_t size) {
  if (axis.grid == 0) return {};
  const acc one = axis.coordinate(0, 0);
  const acc other = axis.coordinate(bins - 1, axis.grid - 1);
  const acc low = one < other ? one : other;
  const acc high = one < other ? other : one;
  if (!(high >= acc(-1) && low <= static_cast<acc>(size))) return {};
  PixelRange range;
  range.first = low <= acc(0) ? 0 : static_cast<int64_t>(low);
  range.last = high >= static_cast<acc>(size - 1) ? size - 1 : static_cast<int64_t>(high) + 1;
  if (high < acc(0)) range.last = 0;
  if (range.first > size - 1) range.first = size - 1;
  return range;
}

}  // namespace opzoo
