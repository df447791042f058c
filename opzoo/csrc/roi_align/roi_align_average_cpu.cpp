// SPDX-License-Identifier: Apache-2.0
// Average RoIAlign in two passes per row of bins: down the map rows of the row's band into a strip
// with a line of channels for every touched column, then along the strip. A pixel is read once per
// row of bins it gives weight to, and every layout adds in the same order: the results are equal
// bit by bit.
#include "roi_align/roi_align_average_cpu.h"

#include "common/dispatch.h"
#include "roi_align/roi_align_bands_cpu.h"

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

template <class T>
class AveragePool {
  using acc = acc_t<T>;

 public:
  AveragePool(const RoIAlignParams& p, const T* input, T* output)
      : p_(p), input_(input), output_(output), layout_(layout_of(p)) {}

  static int64_t block_channels(const RoIAlignParams& p) {
    if (layout_of(p) != Layout::kAdjacentChannels) return kPlanes;
    return std::min(kRun, div_up(p.channels, kLaneStep) * kLaneStep);
  }

  void select(int64_t k) {
    roi_ = k;
    const RoI<acc> roi = read_roi<acc>(p_, k);
    map_ = input_ + roi.image * p_.map_stride[kRoIBatch];
    bands_.assign(p_, roi);
    offsets_.clear();
    if (layout_ == Layout::kAdjacentColumns) {
      group_columns();
    } else {
      for (const int64_t x : bands_.columns) offsets_.push_back(x * p_.map_stride[kRoIColumn]);
      places_ = static_cast<int64_t>(offsets_.size());
    }
  }

  int64_t roi() const { return roi_; }

  // All bins of channels [first, first + count), count <= block_channels().
  void pool(int64_t first, int64_t count) {
    const bool by_strip = layout_ != Layout::kAny && places_ <= kMaxColumns;
    const int64_t together = pooled_rows_together(p_);
    lanes_ = layout_ == Layout::kAdjacentChannels ? div_up(count, kLaneStep) * kLaneStep : kPlanes;
    const T* map = map_ + first * p_.map_stride[kRoIChannel];
    bins_.resize(together * p_.pooled_width * lanes_);
    if (by_strip) strip_.resize(places_ * lanes_);
    for (int64_t ph = 0; ph < p_.pooled_height; ph += together) {
      const int64_t rows = std::min(together, p_.pooled_height - ph);
      for (int64_t row = 0; row < rows; ++row) {
        acc* line = bins_.data() + row * p_.pooled_width * lanes_;
        if (!by_strip) {
          sum_bins(map, ph + row, count, line);
          continue;
        }
        fill_strip(map, ph + row, count);
        multiply_banded(bands_.x.terms.data(),
                        bands_.x.first.data(),
                        p_.pooled_width,
                        strip_.data(),
                        lanes_,
                        line);
      }
      write_bins(ph, rows * p_.pooled_width, first, count);
    }
  }

 private:
  // Touched columns in groups of kLaneStep neighbours, which are loaded together; places become
  // places in the groups. A group at the right border starts early enough to end inside the map.
  void group_columns() {
    place_of_.clear();
    for (const int64_t x : bands_.columns) {
      if (offsets_.empty() || x >= offsets_.back() + kLaneStep) {
        offsets_.push_back(std::min(x, p_.width - kLaneStep));
      }
      const int64_t group = static_cast<int64_t>(offsets_.size()) - 1;
      place_of_.push_back(group * kLaneStep + x - offsets_.back());
    }
    places_ = static_cast<int64_t>(offsets_.size()) * kLaneStep;
    if (places_ > kMaxColumns) return;
    for (auto& term : bands_.x.terms) term.index = place_of_[term.index];
  }

  void fill_strip(const T* map, int64_t ph, int64_t count) {
    const Term<acc>* rows = bands_.y.row(ph);
    const int64_t row_count = bands_.y.count(ph);
    const int64_t row_stride = p_.map_stride[kRoIRow];
    const int64_t groups = static_cast<int64_t>(offsets_.size());
    if (layout_ == Layout::kAdjacentChannels) {
      sum_runs(
          map, rows, row_count, row_stride, offsets_.data(), groups, count, strip_.data(), lanes_);
      return;
    }
    lines_.resize(std::max<size_t>(lines_.size(), places_ * kPlanes));
    sum_planes(map,
               rows,
               row_count,
               row_stride,
               offsets_.data(),
               groups,
               count,
               p_.map_stride[kRoIChannel],
               lines_.data(),
               strip_.data(),
               lanes_);
  }

  // A row of bins for maps of any strides, the terms in the order of the two passes.
  void sum_bins(const T* map, int64_t ph, int64_t count, acc* bins) const {
    for (int64_t pw = 0; pw < p_.pooled_width; ++pw) {
      for (int64_t c = 0; c < count; ++c) {
        const T* plane = map + c * p_.map_stride[kRoIChannel];
        acc sum = 0;
        for (int64_t i = 0; i < bands_.x.count(pw); ++i) {
          const Term<acc> column = bands_.x.row(pw)[i];
          const T* from = plane + bands_.columns[column.index] * p_.map_stride[kRoIColumn];
          acc down = 0;
          for (int64_t j = 0; j < bands_.y.count(ph); ++j) {
            const Term<acc> row = bands_.y.row(ph)[j];
            down += row.weight * static_cast<acc>(from[row.index * p_.map_stride[kRoIRow]]);
          }
          sum += column.weight * down;
        }
        bins[pw * lanes_ + c] = sum;
      }
    }
  }

  // Whole rows of bins from row ph on. The output is contiguous or channels_last.
  void write_bins(int64_t ph, int64_t bins, int64_t first, int64_t count) {
    const int64_t step = p_.pooled_stride[kRoIChannel];
    T* to = output_ + roi_ * p_.pooled_stride[kRoIBatch] + first * step +
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
  const T* input_;
  T* output_;
  Layout layout_;

  int64_t roi_ = -1;
  const T* map_ = nullptr;
  RoIBands<acc> bands_;
  std::vector<int64_t> offsets_;  // of the lines or groups of lines of the strip
  std::vector<int64_t> place_of_;
  int64_t places_ = 0, lanes_ = 0;
  std::vector<acc> strip_;  // [place][lane]
  std::vector<acc> lines_;  // [lane][place], on the way to strip_, or [lane][bin] from bins_
  std::vector<acc> bins_;   // [bin][lane]
};

}  // namespace

template <class T>
void average_forward(const RoIAlignParams& p, const T* input, T* output) {
  const int64_t block = AveragePool<T>::block_channels(p);
  const int64_t blocks = div_up(p.channels, block);
  parallel_for(0, p.rois * blocks, 1, [&](int64_t begin, int64_t end) {
    AveragePool<T> pool(p, input, output);
    for (int64_t item = begin; item < end; ++item) {
      if (pool.roi() != item / blocks) pool.select(item / blocks);
      const int64_t first = item % blocks * block;
      pool.pool(first, std::min(block, p.channels - first));
    }
  });
}

template void average_forward(const RoIAlignParams&, const double*, double*);
template void average_forward(const RoIAlignParams&, const float*, float*);
template void average_forward(const RoIAlignParams&, const Half*, Half*);
template void average_forward(const RoIAlignParams&, const BFloat16*, BFloat16*);

}  // namespace opzoo
