// SPDX-License-Identifier: Apache-2.0
// Backward of RoIAlign, owned by tiles: a piece of one image's plane and 16 of its channels, summed
// in fp32 (fp64 for fp64) in a buffer that stays in L2, then rounded and written once, whatever the
// layout. A pixel adds its RoIs in their order and each RoI's bins in theirs, so neither the tiles
// nor the number of threads change a bit.
#include "common/dispatch.h"
#include "roi_align/roi_align_average_cpu.h"
#include "roi_align/roi_align_bands_plan.h"

namespace opzoo {
namespace {

constexpr int64_t kTileLanes = 16;
constexpr int64_t kTileBytes = 256 * 1024;
constexpr int64_t kTileColumns = 512;

// Where an image's plane is cut, and which piece of grad_input an item of work owns.
struct Tiling {
  int64_t blocks, row_tiles, column_tiles, rows, columns;

  Tiling(const RoIAlignParams& p, int64_t element) {
    blocks = div_up(p.channels, kTileLanes);
    column_tiles = div_up(p.width, kTileColumns);
    columns = div_up(p.width, column_tiles);
    row_tiles =
        div_up(p.height, std::max<int64_t>(1, kTileBytes / (columns * kTileLanes * element)));
    rows = div_up(p.height, row_tiles);
  }
  int64_t items(const RoIAlignParams& p) const {
    return blocks * p.batch * row_tiles * column_tiles;
  }
};

template <class acc>
struct Tile {
  int64_t image, first_channel, channels;
  int64_t first_row, rows, first_column, columns;
  acc* sums;  // [rows][columns][kTileLanes]

  bool meets(const PixelRange& y, const PixelRange& x) const {
    return y.first < first_row + rows && y.last >= first_row && x.first < first_column + columns &&
           x.last >= first_column;
  }
};

// Channel blocks are the outermost axis: threads share every image evenly.
template <class acc>
Tile<acc> tile_of(const RoIAlignParams& p, const Tiling& tiling, int64_t item) {
  Tile<acc> tile;
  tile.first_column = item % tiling.column_tiles * tiling.columns;
  item /= tiling.column_tiles;
  tile.first_row = item % tiling.row_tiles * tiling.rows;
  item /= tiling.row_tiles;
  tile.image = item % p.batch;
  tile.first_channel = item / p.batch * kTileLanes;
  tile.channels = std::min(kTileLanes, p.channels - tile.first_channel);
  tile.rows = std::min(tiling.rows, p.height - tile.first_row);
  tile.columns = std::min(tiling.columns, p.width - tile.first_column);
  return tile;
}

// Rounds and writes a tile. grad_input is contiguous or channels_last.
template <class T>
void write_tile(const RoIAlignParams& p,
                const Tile<acc_t<T>>& tile,
                std::vector<acc_t<T>>& lines,
                T* grad_input) {
  const int64_t step = p.map_stride[kRoIChannel];
  T* to = grad_input + tile.image * p.map_stride[kRoIBatch] + tile.first_channel * step +
          tile.first_row * p.map_stride[kRoIRow] + tile.first_column * p.map_stride[kRoIColumn];
  for (int64_t row = 0; row < tile.rows; ++row, to += p.map_stride[kRoIRow]) {
    const acc_t<T>* from = tile.sums + row * tile.columns * kTileLanes;
    if (step == 1) {
      store_lines(from, kTileLanes, tile.columns, tile.channels, to, p.map_stride[kRoIColumn]);
    } else if constexpr (std::is_same_v<T, acc_t<T>>) {
      transpose(from, kTileLanes, tile.columns, tile.channels, to, step);
    } else {
      lines.resize(tile.columns * kTileLanes);
      transpose(from, kTileLanes, tile.columns, tile.channels, lines.data(), tile.columns);
      store_lines(lines.data(), tile.columns, tile.channels, tile.columns, to, step);
    }
  }
}

// The RoIs of each image, in the order they came.
struct RoIsByImage {
  std::vector<int64_t> first;  // [batch + 1]
  std::vector<int64_t> rois;
};

template <class acc>
RoIsByImage group_by_image(const RoIAlignParams& p) {
  RoIsByImage groups;
  groups.first.assign(p.batch + 1, 0);
  groups.rois.resize(p.rois);
  for (int64_t k = 0; k < p.rois; ++k) ++groups.first[image_index<acc>(p, k) + 1];
  for (int64_t image = 0; image < p.batch; ++image) groups.first[image + 1] += groups.first[image];
  std::vector<int64_t> next(groups.first.begin(), groups.first.end() - 1);
  for (int64_t k = 0; k < p.rois; ++k) groups.rois[next[image_index<acc>(p, k)]++] = k;
  return groups;
}

// make_adder() once per thread: add(roi, k, tile) for every RoI that may touch the tile.
template <class T, class MakeAdder>
void sum_tiles(const RoIAlignParams& p, T* grad_input, const MakeAdder& make_adder) {
  using acc = acc_t<T>;
  const RoIsByImage groups = group_by_image<acc>(p);
  const Tiling tiling(p, sizeof(acc));
  parallel_for(0, tiling.items(p), 1, [&](int64_t begin, int64_t end) {
    std::vector<acc> sums(tiling.rows * tiling.columns * kTileLanes), lines;
    auto add = make_adder();
    for (int64_t item = begin; item < end; ++item) {
      Tile<acc> tile = tile_of<acc>(p, tiling, item);
      tile.sums = sums.data();
      std::fill(sums.begin(), sums.end(), acc(0));
      for (int64_t i = groups.first[tile.image]; i < groups.first[tile.image + 1]; ++i) {
        const int64_t k = groups.rois[i];
        const RoI<acc> roi = read_roi<acc>(p, k);
        const PixelRange y = footprint(roi.y, p.pooled_height, p.height);
        const PixelRange x = footprint(roi.x, p.pooled_width, p.width);
        if (tile.meets(y, x)) add(roi, k, tile);
      }
      write_tile(p, tile, lines, grad_input);
    }
  });
}

// The bands of a RoI, the ones along x turned around: column's place: bins.
template <class acc>
struct BackwardBands : RoIBands<acc> {
  using accumulator = acc;
  void assign(const RoIAlignParams& p, const RoI<acc>& roi) {
    RoIBands<acc>::assign(p, roi);
    this->x = transposed(this->x, static_cast<int64_t>(this->columns.size()));
  }
};

template <class T>
class AverageAdder {
  using acc = acc_t<T>;

 public:
  AverageAdder(const RoIAlignParams& p,
               const T* grad,
               const BandsOfRoIs<BackwardBands<acc>>& bands,
               const int64_t* rows)
      : p_(p), grad_(grad), all_bands_(bands), rows_(rows) {}

  // Row of bins by row of bins: spread along x over the touched columns, then added to the map rows
  // of its band.
  void operator()(const RoI<acc>&, int64_t k, const Tile<acc>& tile) {
    const BackwardBands<acc>& bands = all_bands_.get(p_, k, scratch_);
    const auto& pixels = bands.columns;
    const auto begin = std::lower_bound(pixels.begin(), pixels.end(), tile.first_column);
    const auto end = std::lower_bound(begin, pixels.end(), tile.first_column + tile.columns);
    if (begin == end) return;
    offsets_.clear();
    for (auto x = begin; x != end; ++x) offsets_.push_back((*x - tile.first_column) * kTileLanes);
    const int64_t columns = static_cast<int64_t>(offsets_.size());
    strip_.resize(std::max<size_t>(strip_.size(), columns * kTileLanes));

    const int64_t together = pooled_rows_together(p_);
    bins_.resize(together * p_.pooled_width * kTileLanes);
    int64_t read_until = 0;
    int64_t read_from = 0;
    for (int64_t ph = 0; ph < p_.pooled_height; ++ph) {
      const Term<acc>* row = bands.y.row(ph);
      const Term<acc>* last = row + bands.y.count(ph);
      while (row != last && row->index < tile.first_row) ++row;
      while (row != last && last[-1].index >= tile.first_row + tile.rows) --last;
      if (row == last) continue;
      if (ph >= read_until) {
        read_from = ph;
        read_until = std::min(ph + together, p_.pooled_height);
        read_bins(k, ph, read_until - ph, tile);
      }
      multiply_banded(bands.x.terms.data(),
                      bands.x.first.data() + (begin - pixels.begin()),
                      columns,
                      bins_.data() + (ph - read_from) * p_.pooled_width * kTileLanes,
                      kTileLanes,
                      strip_.data());
      for (; row != last; ++row) {
        acc* to = tile.sums + (row->index - tile.first_row) * tile.columns * kTileLanes;
        add_weighted(row->weight, strip_.data(), kTileLanes, offsets_.data(), columns, to);
      }
    }
  }

 private:
  // bins_[bin][lane] from `rows` rows of bins of any strides.
  void read_bins(int64_t k, int64_t ph, int64_t rows, const Tile<acc>& tile) {
    const auto& stride = p_.pooled_stride;
    const int64_t step = stride[kRoIChannel];
    const int64_t bins = rows * p_.pooled_width;
    const T* from = grad_ + (rows_ ? rows_[k] : k) * stride[kRoIBatch] + tile.first_channel * step +
                    ph * stride[kRoIRow];
    if (stride[kRoIColumn] == 1 && stride[kRoIRow] == p_.pooled_width) {
      if constexpr (std::is_same_v<T, acc>) {
        transpose(from, step, tile.channels, bins, bins_.data(), kTileLanes);
      } else {
        lines_.resize(std::max<size_t>(lines_.size(), bins * kTileLanes));
        load_lines(from, step, tile.channels, bins, lines_.data(), bins);
        transpose(lines_.data(), bins, tile.channels, bins, bins_.data(), kTileLanes);
      }
      return;
    }
    for (int64_t row = 0; row < rows; ++row, from += stride[kRoIRow]) {
      acc* to = bins_.data() + row * p_.pooled_width * kTileLanes;
      if (step == 1) {
        load_lines(from, stride[kRoIColumn], p_.pooled_width, tile.channels, to, kTileLanes);
        continue;
      }
      for (int64_t pw = 0; pw < p_.pooled_width; ++pw) {
        for (int64_t c = 0; c < tile.channels; ++c) {
          to[pw * kTileLanes + c] = static_cast<acc>(from[pw * stride[kRoIColumn] + c * step]);
        }
      }
    }
  }

  const RoIAlignParams& p_;
  const T* grad_;
  const BandsOfRoIs<BackwardBands<acc>>& all_bands_;
  const int64_t* rows_;
  BackwardBands<acc> scratch_;
  std::vector<int64_t> offsets_;  // of the touched columns in a row of the tile
  std::vector<acc> bins_;         // [bin][lane]
  std::vector<acc> strip_;        // [touched column][lane]
  std::vector<acc> lines_;        // [lane][bin], on the way to bins_
};

// The four pixels of a maximum, those inside the tile.
template <class acc>
void add_in_tile(const RoIAlignParams& p,
                 const Tile<acc>& tile,
                 const PlaneTap<acc>& tap,
                 acc grad,
                 int64_t lane) {
  for (int corner = 0; corner < 4; ++corner) {
    const int64_t row = tap.offset[corner] / p.width - tile.first_row;
    const int64_t column = tap.offset[corner] % p.width - tile.first_column;
    if (row < 0 || row >= tile.rows || column < 0 || column >= tile.columns) continue;
    tile.sums[(row * tile.columns + column) * kTileLanes + lane] += grad * tap.weight[corner];
  }
}

int64_t bin_offset(const int64_t (&stride)[4], int64_t k, int64_t c, int64_t ph, int64_t pw) {
  return k * stride[kRoIBatch] + c * stride[kRoIChannel] + ph * stride[kRoIRow] +
         pw * stride[kRoIColumn];
}

}  // namespace

template <class T>
void average_backward(const RoIAlignParams& p, const T* grad, T* grad_input, const int64_t* rows) {
  const BandsOfRoIs<BackwardBands<acc_t<T>>> bands(p);
  sum_tiles(p, grad_input, [&] { return AverageAdder<T>(p, grad, bands, rows); });
}

template <class T>
void maximum_backward(const RoIAlignParams& p,
                      const T* grad,
                      const int64_t* argmax,
                      T* grad_input) {
  using acc = acc_t<T>;
  RoIAlignParams flat = p;  // taps as row * width + column
  flat.map_stride[kRoIRow] = p.width;
  flat.map_stride[kRoIColumn] = 1;
  const auto add = [&](const RoI<acc>& roi, int64_t k, const Tile<acc>& tile) {
    for (int64_t ph = 0; ph < p.pooled_height; ++ph) {
      if (!touches(roi.y, ph, tile.first_row, tile.first_row + tile.rows - 1)) continue;
      for (int64_t pw = 0; pw < p.pooled_width; ++pw) {
        if (!touches(roi.x, pw, tile.first_column, tile.first_column + tile.columns - 1)) continue;
        for (int64_t lane = 0; lane < tile.channels; ++lane) {
          const int64_t c = tile.first_channel + lane;
          const int64_t sample = argmax[bin_offset(p.argmax_stride, k, c, ph, pw)];
          PlaneTap<acc> tap;
          if (!tap_of_sample(flat, roi, ph, pw, sample, tap)) continue;
          const T value = grad[bin_offset(p.pooled_stride, k, c, ph, pw)];
          add_in_tile(p, tile, tap, static_cast<acc>(value), lane);
        }
      }
    }
  };
  sum_tiles(p, grad_input, [&] { return add; });
}

#define OPZOO_INSTANTIATE(T)                                                           \
  template void average_backward(const RoIAlignParams&, const T*, T*, const int64_t*); \
  template void maximum_backward(const RoIAlignParams&, const T*, const int64_t*, T*);
OPZOO_INSTANTIATE(double)
OPZOO_INSTANTIATE(float)
OPZOO_INSTANTIATE(Half)
OPZOO_INSTANTIATE(BFloat16)

}  // namespace opzoo
