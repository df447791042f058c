// SPDX-License-Identifier: Apache-2.0
// Average RoIAlign in two passes per row of bins: down the map rows of the row's band into a strip
// with a line of channels for every touched column, then along the strip. A pixel is read once per
// row of bins it gives weight to, and every layout adds in the same order: the results are equal
// bit by bit.
#include "roi_align/roi_align_average_cpu.h"

#include "common/dispatch.h"
#include "roi_align/roi_align_bands_plan.h"

namespace opzoo {
namespace {

// Channels of a line: with adjacent channels, runs long enough for the prefetcher and a strip that
// stays in L1; with adjacent columns, the 16 lanes of two vectors.
constexpr int64_t kRun = 128;
constexpr int64_t kPlanes = 16;
// Wider strips leave the caches: beyond, bins are summed one by one.
constexpr int64_t kMaxColumns = 4096;

enum class Layout { kAdjacentChannels, kAdjacentColumns, kAny };

Layout layout_of(const RoIAlignParams& p) {
  if (p.map_stride[kRoIColumn] == 1 && p.width >= kLaneStep) return Layout::kAdjacentColumns;
  if (p.map_stride[kRoIChannel] == 1) return Layout::kAdjacentChannels;
  return Layout::kAny;
}

// With the strip's lines: where they start in the map, relative to channel and row.
template <class acc>
struct ForwardBands : RoIBands<acc> {
  using accumulator = acc;

  int64_t image = 0;
  std::vector<int64_t> offsets;  // of the lines or groups of lines
  int64_t places = 0;            // lines

  void assign(const RoIAlignParams& p, const RoI<acc>& roi) {
    RoIBands<acc>::assign(p, roi);
    image = roi.image;
    offsets.clear();
    if (layout_of(p) == Layout::kAdjacentColumns) {
      group_columns(p.width);
      return;
    }
    for (const int64_t x : this->columns) offsets.push_back(x * p.map_stride[kRoIColumn]);
    places = static_cast<int64_t>(offsets.size());
  }

 private:
  // Touched columns in groups of kLaneStep neighbours, which are loaded together; places become
  // places in the groups. A group at the right border starts early enough to end inside the map.
  void group_columns(int64_t width) {
    std::vector<int64_t> place_of;
    for (const int64_t x : this->columns) {
      if (offsets.empty() || x >= offsets.back() + kLaneStep) {
        offsets.push_back(std::min(x, width - kLaneStep));
      }
      const int64_t group = static_cast<int64_t>(offsets.size()) - 1;
      place_of.push_back(group * kLaneStep + x - offsets.back());
    }
    places = static_cast<int64_t>(offsets.size()) * kLaneStep;
    if (places > kMaxColumns) return;
    for (auto& term : this->x.terms) term.index = place_of[term.index];
  }
};

template <class T>
class AveragePool {
  using acc = acc_t<T>;

 public:
  AveragePool(const RoIAlignParams& p,
              const BandsOfRoIs<ForwardBands<acc_t<T>>>& bands,
              const T* input,
              T* output,
              const int64_t* rows)
      : p_(p),
        all_bands_(bands),
        input_(input),
        output_(output),
        rows_(rows),
        layout_(layout_of(p)) {}

  static int64_t block_channels(const RoIAlignParams& p) {
    if (layout_of(p) != Layout::kAdjacentChannels) return kPlanes;
    return std::min(kRun, div_up(p.channels, kLaneStep) * kLaneStep);
  }

  // All bins of RoI k, channels [first, first + count), count <= block_channels().
  void pool(int64_t k, int64_t first, int64_t count) {
    const ForwardBands<acc>& bands = all_bands_.get(p_, k, scratch_);
    const bool by_strip = layout_ != Layout::kAny && bands.places <= kMaxColumns;
    const int64_t together = pooled_rows_together(p_);
    lanes_ = layout_ == Layout::kAdjacentChannels ? div_up(count, kLaneStep) * kLaneStep : kPlanes;
    const T* map =
        input_ + bands.image * p_.map_stride[kRoIBatch] + first * p_.map_stride[kRoIChannel];
    bins_.resize(together * p_.pooled_width * lanes_);
    if (by_strip) strip_.resize(bands.places * lanes_);
    for (int64_t ph = 0; ph < p_.pooled_height; ph += together) {
      const int64_t rows = std::min(together, p_.pooled_height - ph);
      for (int64_t row = 0; row < rows; ++row) {
        acc* line = bins_.data() + row * p_.pooled_width * lanes_;
        if (!by_strip) {
          sum_bins(bands, map, ph + row, count, line);
          continue;
        }
        fill_strip(bands, map, ph + row, count);
        multiply_banded(bands.x.terms.data(),
                        bands.x.first.data(),
                        p_.pooled_width,
                        strip_.data(),
                        lanes_,
                        line);
      }
      write_bins(k, ph, rows * p_.pooled_width, first, count);
    }
  }

 private:
  void fill_strip(const ForwardBands<acc>& bands, const T* map, int64_t ph, int64_t count) {
    const Term<acc>* rows = bands.y.row(ph);
    const int64_t row_count = bands.y.count(ph);
    const int64_t row_stride = p_.map_stride[kRoIRow];
    const int64_t groups = static_cast<int64_t>(bands.offsets.size());
    if (layout_ == Layout::kAdjacentChannels) {
      sum_runs(map,
               rows,
               row_count,
               row_stride,
               bands.offsets.data(),
               groups,
               count,
               strip_.data(),
               lanes_);
      return;
    }
    lines_.resize(std::max<size_t>(lines_.size(), bands.places * kPlanes));
    sum_planes(map,
               rows,
               row_count,
               row_stride,
               bands.offsets.data(),
               groups,
               count,
               p_.map_stride[kRoIChannel],
               lines_.data(),
               strip_.data(),
               lanes_);
  }

  // A row of bins for maps of any strides, the terms in the order of the two passes.
  void sum_bins(
      const ForwardBands<acc>& bands, const T* map, int64_t ph, int64_t count, acc* bins) const {
    for (int64_t pw = 0; pw < p_.pooled_width; ++pw) {
      for (int64_t c = 0; c < count; ++c) {
        const T* plane = map + c * p_.map_stride[kRoIChannel];
        acc sum = 0;
        for (int64_t i = 0; i < bands.x.count(pw); ++i) {
          const Term<acc> column = bands.x.row(pw)[i];
          const T* from = plane + bands.columns[column.index] * p_.map_stride[kRoIColumn];
          acc down = 0;
          for (int64_t j = 0; j < bands.y.count(ph); ++j) {
            const Term<acc> row = bands.y.row(ph)[j];
            down += row.weight * static_cast<acc>(from[row.index * p_.map_stride[kRoIRow]]);
          }
          sum += column.weight * down;
        }
        bins[pw * lanes_ + c] = sum;
      }
    }
  }

  // Whole rows of bins from row ph on. The output is contiguous or channels_last.
  void write_bins(int64_t k, int64_t ph, int64_t bins, int64_t first, int64_t count) {
    const int64_t step = p_.pooled_stride[kRoIChannel];
    T* to = output_ + (rows_ ? rows_[k] : k) * p_.pooled_stride[kRoIBatch] + first * step +
            ph * p_.pooled_stride[kRoIRow];
    if (step == 1) {
      store_lines(bins_.data(), lanes_, bins, count, to, p_.pooled_stride[kRoIColumn]);
      return;
    }
    if constexpr (std::is_same_v<T, acc>) {
      transpose(bins_.data(), lanes_, bins, count, to, step);
    } else {
      lines_.resize(std::max<size_t>(lines_.size(), bins * lanes_));
      transpose(bins_.data(), lanes_, bins, count, lines_.data(), bins);
      store_lines(lines_.data(), bins, count, bins, to, step);
    }
  }

  const RoIAlignParams& p_;
  const BandsOfRoIs<ForwardBands<acc>>& all_bands_;
  const T* input_;
  T* output_;
  const int64_t* rows_;
  Layout layout_;

  ForwardBands<acc> scratch_;
  int64_t lanes_ = 0;
  std::vector<acc> strip_;  // [place][lane]
  std::vector<acc> lines_;  // [lane][place], on the way to strip_, or [lane][bin] from bins_
  std::vector<acc> bins_;   // [bin][lane]
};

}  // namespace

template <class T>
void average_forward(const RoIAlignParams& p, const T* input, T* output, const int64_t* rows) {
  const int64_t block = AveragePool<T>::block_channels(p);
  const int64_t blocks = div_up(p.channels, block);
  const BandsOfRoIs<ForwardBands<acc_t<T>>> bands(p);
  // Planes: block after block, 16 planes stay in the caches while the RoIs pass by. Runs of
  // channels: RoI after RoI, whose pixels lie in one piece.
  const bool by_block = layout_of(p) != Layout::kAdjacentChannels;
  parallel_for(0, p.rois * blocks, 1, [&](int64_t begin, int64_t end) {
    AveragePool<T> pool(p, bands, input, output, rows);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t k = by_block ? item % p.rois : item / blocks;
      const int64_t first = (by_block ? item / p.rois : item % blocks) * block;
      pool.pool(k, first, std::min(block, p.channels - first));
    }
  });
}

template void average_forward(const RoIAlignParams&, const double*, double*, const int64_t*);
template void average_forward(const RoIAlignParams&, const float*, float*, const int64_t*);
template void average_forward(const RoIAlignParams&, const Half*, Half*, const int64_t*);
template void average_forward(const RoIAlignParams&, const BFloat16*, BFloat16*, const int64_t*);

}  // namespace opzoo
