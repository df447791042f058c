// SPDX-License-Identifier: Apache-2.0
// A map row at a time: every pixel that a bin reads is multiplied with the bin's gradient over a
// run of channels, and the product weighted four ways. Pixels and gradients lie in lines of
// neighbouring channels, in the map itself or gathered from it, so that every layout adds in the
// same order: the results are equal bit by bit.
#include <algorithm>
#include <vector>

#include "roi_align/roi_align_boxes.h"
#include "roi_align/roi_align_lanes_cpu.h"
#include "roi_align/roi_align_plan.h"

namespace opzoo {
namespace {

// Channels of a line, and a thread's smallest piece of work for one RoI.
constexpr int64_t kRun = 128;
constexpr int kEdges = 4;

template <class acc>
struct EdgeTerm {
  int64_t offset;  // of the map row or of the column's line, in elements
  EdgeWeights<acc> weights;
};

// The entries of every bin along an axis, offset: the pixel.
template <class acc>
struct EdgeTerms {
  std::vector<EdgeTerm<acc>> terms;
  std::vector<int64_t> first;  // [bins + 1]

  void assign(const EdgeAxis<acc>& edges) {
    terms.clear();
    first.assign(1, 0);
    for (int64_t bin = 0; bin < edges.bins; ++bin) {
      const EntryRange entries = entries_of(edges, bin);
      for (int64_t i = 0; i < entries.count; ++i) {
        const auto entry = entry_at(edges, bin, entries, i);
        const auto& w = entry.weights;
        if (w.weight == acc(0) && w.low == acc(0) && w.high == acc(0)) continue;
        terms.push_back({entry.pixel, w});
      }
      first.push_back(static_cast<int64_t>(terms.size()));
    }
  }
};

// Columns that are gathered together.
struct ColumnRun {
  int64_t pixel, place, length;
};

// sums += weights of each term times the product of its line with the bin's line of gradients.
template <class acc>
OPZOO_LANES_INLINE void add_products_of(const EdgeTerm<acc>* terms,
                                        const int64_t* first,
                                        int64_t bins,
                                        const acc* lines,
                                        const acc* grad,
                                        int64_t lanes,
                                        EdgeWeights<acc>& sums) {
  for (int64_t bin = 0; bin < bins; ++bin) {
    const acc* own = grad + bin * lanes;
    for (int64_t i = first[bin]; i < first[bin + 1]; ++i) {
      const acc* line = lines + terms[i].offset;
      Lanes<acc> product = {};
      for (int64_t lane = 0; lane < lanes; lane += kLaneStep) {
        Lanes<acc> pixel, gradient;
        load(line + lane, pixel);
        load(own + lane, gradient);
        product += pixel * gradient;
      }
      const acc total = ((product[0] + product[4]) + (product[1] + product[5])) +
                        ((product[2] + product[6]) + (product[3] + product[7]));
      sums.weight += terms[i].weights.weight * total;
      sums.low += terms[i].weights.low * total;
      sums.high += terms[i].weights.high * total;
    }
  }
}

// Function multiversioning takes no templates: an overload for each accumulator.
OPZOO_LANES_KERNEL void add_products(const EdgeTerm<float>* terms,
                                     const int64_t* first,
                                     int64_t bins,
                                     const float* lines,
                                     const float* grad,
                                     int64_t lanes,
                                     EdgeWeights<float>& sums) {
  add_products_of(terms, first, bins, lines, grad, lanes, sums);
}
OPZOO_LANES_KERNEL void add_products(const EdgeTerm<double>* terms,
                                     const int64_t* first,
                                     int64_t bins,
                                     const double* lines,
                                     const double* grad,
                                     int64_t lanes,
                                     EdgeWeights<double>& sums) {
  add_products_of(terms, first, bins, lines, grad, lanes, sums);
}

template <class T>
class BoxGradient {
  using acc = acc_t<T>;

 public:
  BoxGradient(const RoIAlignParams& p, const T* grad, const T* input)
      : p_(p), grad_(grad), input_(input) {}

  // What channels [first, first + count) give to the edges of RoI k, count <= kRun.
  void sum(int64_t k, int64_t first, int64_t count, acc (&edges)[kEdges]) {
    const T* map = assign(k) + first * p_.map_stride[kRoIChannel];
    const T* grad = grad_ + k * p_.pooled_stride[kRoIBatch] + first * p_.pooled_stride[kRoIChannel];
    lanes_ = div_up(count, kLaneStep) * kLaneStep;
    const bool in_place =
        std::is_same_v<T, acc> && p_.map_stride[kRoIChannel] == 1 && lanes_ == count;
    place_columns(in_place);
    pooled_.assign(p_.pooled_width * lanes_, acc(0));
    std::fill(edges, edges + kEdges, acc(0));
    for (int64_t ph = 0; ph < p_.pooled_height; ++ph) {
      if (rows_.first[ph] == rows_.first[ph + 1]) continue;
      gather(grad + ph * p_.pooled_stride[kRoIRow],
             p_.pooled_stride[kRoIChannel],
             p_.pooled_stride[kRoIColumn],
             count,
             p_.pooled_width,
             pooled_.data());
      for (int64_t i = rows_.first[ph]; i < rows_.first[ph + 1]; ++i) {
        const EdgeTerm<acc>& row = rows_.terms[i];
        EdgeWeights<acc> sums;
        add_products(columns_.terms.data(),
                     columns_.first.data(),
                     p_.pooled_width,
                     row_lines(map + row.offset * p_.map_stride[kRoIRow], count, in_place),
                     pooled_.data(),
                     lanes_,
                     sums);
        edges[0] += row.weights.weight * sums.low;
        edges[1] += row.weights.low * sums.weight;
        edges[2] += row.weights.weight * sums.high;
        edges[3] += row.weights.high * sums.weight;
      }
    }
  }

 private:
  // The terms of RoI k, kept from one block of channels to the next; its image.
  const T* assign(int64_t k) {
    const auto roi = read_edge_roi<acc>(p_, k);
    if (k != assigned_) {
      rows_.assign(roi.y);
      columns_.assign(roi.x);
      pixel_of_.clear();
      for (const auto& term : columns_.terms) pixel_of_.push_back(term.offset);
      number_columns();
      assigned_ = k;
    }
    return input_ + roi.image * p_.map_stride[kRoIBatch];
  }

  // The columns that occur, ascending, in runs. A gap of a few columns is gathered along: a long
  // run costs less than two short ones.
  void number_columns() {
    constexpr int64_t kGap = 6;
    std::vector<int64_t> pixels = pixel_of_;
    std::sort(pixels.begin(), pixels.end());
    columns_used_.clear();
    runs_.clear();
    for (const int64_t pixel : pixels) {
      if (runs_.empty() || pixel > runs_.back().pixel + runs_.back().length + kGap) {
        runs_.push_back({pixel, static_cast<int64_t>(columns_used_.size()), 0});
      }
      ColumnRun& run = runs_.back();
      for (; run.pixel + run.length <= pixel; ++run.length) {
        columns_used_.push_back(run.pixel + run.length);
      }
    }
  }

  void place_columns(bool in_place) {
    for (size_t i = 0; i < pixel_of_.size(); ++i) {
      if (in_place) {
        columns_.terms[i].offset = pixel_of_[i] * p_.map_stride[kRoIColumn];
      } else {
        const auto at = std::lower_bound(columns_used_.begin(), columns_used_.end(), pixel_of_[i]);
        columns_.terms[i].offset = (at - columns_used_.begin()) * lanes_;
      }
    }
    lines_.assign(in_place ? 0 : columns_used_.size() * lanes_, acc(0));
  }

  const acc* row_lines(const T* row, int64_t count, bool in_place) {
    if constexpr (std::is_same_v<T, acc>) {
      if (in_place) return row;
    }
    for (const ColumnRun& run : runs_) {
      gather(row + run.pixel * p_.map_stride[kRoIColumn],
             p_.map_stride[kRoIChannel],
             p_.map_stride[kRoIColumn],
             count,
             run.length,
             lines_.data() + run.place * lanes_);
    }
    return lines_.data();
  }

  // to[i * lanes_ + lane] = from[lane * channel_stride + i * stride]; the lanes from count on are
  // left as they are, 0.
  void gather(const T* from,
              int64_t channel_stride,
              int64_t stride,
              int64_t count,
              int64_t length,
              acc* to) {
    if (channel_stride == 1) {
      load_lines(from, stride, length, count, to, lanes_);
    } else if (stride == 1) {
      if constexpr (std::is_same_v<T, acc>) {
        transpose(from, channel_stride, count, length, to, lanes_);
      } else {
        planes_.resize(std::max<size_t>(planes_.size(), count * length));
        load_lines(from, channel_stride, count, length, planes_.data(), length);
        transpose(planes_.data(), length, count, length, to, lanes_);
      }
    } else {
      for (int64_t i = 0; i < length; ++i) {
        for (int64_t lane = 0; lane < count; ++lane) {
          to[i * lanes_ + lane] = static_cast<acc>(from[lane * channel_stride + i * stride]);
        }
      }
    }
  }

  const RoIAlignParams& p_;
  const T* grad_;
  const T* input_;

  int64_t assigned_ = -1;
  EdgeTerms<acc> rows_, columns_;
  std::vector<int64_t> pixel_of_;      // of each term of columns_
  std::vector<int64_t> columns_used_;  // the pixels of all runs, ascending
  std::vector<ColumnRun> runs_;

  int64_t lanes_ = 0;
  std::vector<acc> pooled_;  // [bin][lane] of a row of bins
  std::vector<acc> lines_;   // [place][lane] of a map row
  std::vector<acc> planes_;  // [lane][column], on the way to lines_
};

// grad_boxes [rois, columns], contiguous, columns 4 or 5.
template <class T>
void average_backward_boxes(
    const RoIAlignParams& p, const T* grad, const T* input, acc_t<T>* grad_boxes, int64_t columns) {
  using acc = acc_t<T>;
  const int64_t blocks = div_up(p.channels, kRun);
  std::vector<acc> partial(p.rois * blocks * kEdges);
  parallel_for(0, p.rois * blocks, 1, [&](int64_t begin, int64_t end) {
    BoxGradient<T> gradient(p, grad, input);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first = item % blocks * kRun;
      acc edges[kEdges];
      gradient.sum(item / blocks, first, std::min(kRun, p.channels - first), edges);
      std::copy(edges, edges + kEdges, partial.begin() + item * kEdges);
    }
  });
  for (int64_t k = 0; k < p.rois; ++k) {
    acc* to = grad_boxes + k * columns;
    std::fill(to, to + columns, acc(0));
    for (int64_t i = 0; i < blocks * kEdges; ++i) {
      to[columns - kEdges + i % kEdges] += partial[k * blocks * kEdges + i];
    }
  }
}

Tensor roi_align_boxes_backward_cpu(const Tensor& grad,
                                    const Tensor& input,
                                    const Tensor& boxes,
                                    const OptionalTensor& batch_index,
                                    double spatial_scale,
                                    int64_t sampling_ratio,
                                    bool aligned) {
  constexpr const char* kOp = "_roi_align_boxes_backward";
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan = plan_roi_align_boxes(kOp, grad, input, boxes, batch_index, options);
  dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
    average_backward_boxes<T>(plan.params,
                              data<T>(grad),
                              data<T>(input),
                              mutable_data<acc_t<T>>(plan.out),
                              plan.out.size(1));
  });
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("_roi_align_boxes_backward", OPZOO_BOX(opzoo::roi_align_boxes_backward_cpu));
}
