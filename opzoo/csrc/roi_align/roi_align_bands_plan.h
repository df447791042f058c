// SPDX-License-Identifier: Apache-2.0
// The weights of a RoI as banded matrices (roi_align_bands.h), in memory that grows with the
// touched pixels and the bins, not with the samples.
#pragma once

#include <algorithm>
#include <vector>

#include "common/dispatch.h"
#include "roi_align/roi_align_bands.h"
#include "roi_align/roi_align_lanes_cpu.h"

namespace opzoo {

template <class acc>
struct Banded {
  std::vector<Term<acc>> terms;
  std::vector<int64_t> first;  // [rows + 1]

  int64_t rows() const { return static_cast<int64_t>(first.size()) - 1; }
  const Term<acc>* row(int64_t i) const { return terms.data() + first[i]; }
  int64_t count(int64_t i) const { return first[i + 1] - first[i]; }
};

// A row for each bin of an axis, index: the pixel. The number of samples is divided out here, per
// axis, so that every row sums to 1 at most.
template <class acc>
void band_bins(const RoIAxis<acc>& axis, int64_t bins, int64_t size, Banded<acc>& banded) {
  banded.terms.clear();
  banded.first.assign(1, 0);
  const acc grid = static_cast<acc>(std::max<int64_t>(axis.grid, 1));
  for (int64_t bin = 0; bin < bins; ++bin) {
    merge_samples(axis, bin, size, [&](int64_t pixel, acc weight) {
      banded.terms.push_back({pixel, weight / grid});
    });
    banded.first.push_back(static_cast<int64_t>(banded.terms.size()));
  }
}

// The pixels that occur, ascending; every index becomes the pixel's place among them.
template <class acc>
void number_pixels(bool mirrored, Banded<acc>& banded, std::vector<int64_t>& pixels) {
  pixels.clear();
  const auto for_each_term = [&](const auto& body) {
    for (int64_t n = 0; n < banded.rows(); ++n) {
      const int64_t bin = mirrored ? banded.rows() - 1 - n : n;
      for (int64_t i = banded.first[bin]; i < banded.first[bin + 1]; ++i) body(banded.terms[i]);
    }
  };
  // Neighbouring bins share a pixel or two, and rounding may swap samples closer than one unit in
  // the last place: a few steps back at most.
  for_each_term([&](const Term<acc>& term) {
    auto at = pixels.end();
    while (at != pixels.begin() && at[-1] > term.index) --at;
    if (at == pixels.begin() || at[-1] != term.index) pixels.insert(at, term.index);
  });
  size_t place = 0;
  for_each_term([&](Term<acc>& term) {
    while (pixels[place] < term.index) ++place;
    while (pixels[place] > term.index) --place;
    term.index = static_cast<int64_t>(place);
  });
}

template <class acc>
Banded<acc> transposed(const Banded<acc>& banded, int64_t columns) {
  Banded<acc> result;
  result.first.assign(columns + 1, 0);
  result.terms.resize(banded.terms.size());
  for (const auto& term : banded.terms) ++result.first[term.index + 1];
  for (int64_t i = 0; i < columns; ++i) result.first[i + 1] += result.first[i];
  std::vector<int64_t> next(result.first.begin(), result.first.end() - 1);
  for (int64_t row = 0; row < banded.rows(); ++row) {
    for (int64_t i = banded.first[row]; i < banded.first[row + 1]; ++i) {
      const auto& term = banded.terms[i];
      result.terms[next[term.index]++] = {row, term.weight};
    }
  }
  return result;
}

template <class acc>
struct RoIBands {
  Banded<acc> y;  // bin row: map rows
  Banded<acc> x;  // bin column: places in columns
  std::vector<int64_t> columns;

  void assign(const RoIAlignParams& p, const RoI<acc>& roi) {
    band_bins(roi.y, p.pooled_height, p.height, y);
    band_bins(roi.x, p.pooled_width, p.width, x);
    number_pixels(roi.x.bin < acc(0), x, columns);
  }
};

// RoIs are met once per block of channels or tile. The bands of the first ones are kept, as many as
// surely fit 64 MiB, the others are worked out again. Bands: RoIBands or derived from it.
template <class Bands>
class BandsOfRoIs {
 public:
  explicit BandsOfRoIs(const RoIAlignParams& p) {
    const double terms = static_cast<double>(p.height) + static_cast<double>(p.width) +
                         3.0 * static_cast<double>(p.pooled_height) +
                         3.0 * static_cast<double>(p.pooled_width);
    kept_.resize(std::min(p.rois, static_cast<int64_t>((64 << 20) / (64.0 * terms))));
    parallel_for(0, static_cast<int64_t>(kept_.size()), 16, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) assign(p, k, kept_[k]);
    });
  }

  const Bands& get(const RoIAlignParams& p, int64_t k, Bands& scratch) const {
    if (k < static_cast<int64_t>(kept_.size())) return kept_[k];
    assign(p, k, scratch);
    return scratch;
  }

 private:
  static void assign(const RoIAlignParams& p, int64_t k, Bands& bands) {
    bands.assign(p, read_roi<typename Bands::accumulator>(p, k));
  }

  std::vector<Bands> kept_;
};

// Rows of bins handled together, so that a matrix of their lines stays in L1.
inline int64_t pooled_rows_together(const RoIAlignParams& p) {
  constexpr int64_t kBins = 128;
  return std::clamp<int64_t>(kBins / p.pooled_width, 1, p.pooled_height);
}

}  // namespace opzoo
