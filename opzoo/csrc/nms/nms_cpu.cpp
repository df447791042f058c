// SPDX-License-Identifier: Apache-2.0
// Boxes are laid out by class and, within a class, in score order: one segment per class, which no
// other class touches. A segment is worked off in blocks of its first survivors:
//   1. the block's boxes suppress each other, one after another;
//   2. those that are left suppress the rest of the segment, in any order;
//   3. what survives of the rest moves up.
// Nothing depends on how step 2 is split among threads.
#include <algorithm>
#include <memory>
#include <vector>

#include "nms/nms_plan.h"

namespace opzoo {
namespace {

// Timings are flat from 32 to 256.
constexpr int64_t kBlock = 128;
constexpr int64_t kTile = 1024;   // boxes of step 2 that stay in L1 while the block passes
constexpr int64_t kGrain = 2048;  // boxes of step 2 that are worth a thread
// Segments of this size are split among threads; smaller ones run side by side, about as many boxes
// to a thread.
constexpr int64_t kSplitFrom = 8192;

struct Segment {
  int64_t begin, end;
};

template <class acc>
struct Layout {
  // As wide as a coordinate: then a vector register holds as many flags as boxes.
  using Flag = std::conditional_t<sizeof(acc) == 8, int64_t, int32_t>;

  std::vector<acc> x1, y1, x2, y2, area;
  std::vector<Flag> removed;
  std::vector<int64_t> rank;  // place in score order
  std::vector<Segment> segments;

  explicit Layout(int64_t n) : x1(n), y1(n), x2(n), y2(n), area(n), removed(n), rank(n) {}

  Box<acc> box(int64_t i) const { return {x1[i], y1[i], x2[i], y2[i]}; }

  void set(int64_t i, const Box<acc>& box, int64_t its_rank) {
    x1[i] = box.x1;
    y1[i] = box.y1;
    x2[i] = box.x2;
    y2[i] = box.y2;
    area[i] = box_area(box);
    rank[i] = its_rank;
  }

  void move(int64_t from, int64_t to) {
    x1[to] = x1[from];
    y1[to] = y1[from];
    x2[to] = x2[from];
    y2[to] = y2[from];
    area[to] = area[from];
    rank[to] = rank[from];
  }
};

// Indices of the boxes in score order.
std::vector<int64_t> score_order(const NmsPlan& plan) {
  struct Entry {
    int64_t key, index;
  };
  std::vector<Entry> entries;
  entries.reserve(plan.n);
  dispatch_all(plan.scores.scalar_type(), plan.op, [&]<class T>() {
    for (int64_t i = 0; i < plan.n; ++i) {
      const int64_t key = score_key(load_number<T>(plan.scores_view, 0, i));
      if (plan.score_limit.admits(key)) entries.push_back({key, i});
    }
  });
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& left, const Entry& right) {
    return left.key > right.key;
  });
  std::vector<int64_t> order(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) order[i] = entries[i].index;
  return order;
}

template <class T, class acc = box_acc_t<T>>
Layout<acc> lay_out(const NmsPlan& plan, const std::vector<int64_t>& order) {
  const auto n = static_cast<int64_t>(order.size());
  Layout<acc> layout(n);
  if (!plan.classes) {
    for (int64_t i = 0; i < n; ++i) layout.set(i, load_box<T>(plan.boxes_view, 0, order[i]), i);
    layout.segments = {{0, n}};
    return layout;
  }
  struct Entry {
    int64_t id, rank;
  };
  std::vector<Entry> entries(n);
  for (int64_t i = 0; i < n; ++i)
    entries[i] = {load_number<int64_t>(plan.classes_view, 0, order[i]), i};
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& left, const Entry& right) {
    return left.id < right.id;
  });
  for (int64_t i = 0; i < n; ++i) {
    const int64_t rank = entries[i].rank;
    layout.set(i, load_box<T>(plan.boxes_view, 0, order[rank]), rank);
    if (i == 0 || entries[i].id != entries[i - 1].id) layout.segments.push_back({i, i});
    layout.segments.back().end = i + 1;
  }
  return layout;
}

// Box `row` against boxes [begin, end), all after it. One plain loop over separate arrays, without
// a branch, so that the compiler vectorises it.
template <class acc>
void suppress(Layout<acc>& layout, int64_t row, int64_t begin, int64_t end, acc threshold) {
  const Box<acc> box = layout.box(row);
  const acc area = layout.area[row];
  const acc* __restrict__ x1 = layout.x1.data();
  const acc* __restrict__ y1 = layout.y1.data();
  const acc* __restrict__ x2 = layout.x2.data();
  const acc* __restrict__ y2 = layout.y2.data();
  const acc* __restrict__ areas = layout.area.data();
  auto* __restrict__ removed = layout.removed.data();
  for (int64_t j = begin; j < end; ++j) {
    const acc iou = box_iou<acc>(box, area, {x1[j], y1[j], x2[j], y2[j]}, areas[j]);
    removed[j] |= iou > threshold;
  }
}

template <class acc>
void run_segment(Layout<acc>& layout, Segment segment, acc threshold, bool split, bool* keep) {
  auto [begin, end] = segment;
  while (begin < end) {
    const int64_t block_end = std::min(begin + kBlock, end);
    int64_t kept_end = begin;
    for (int64_t i = begin; i < block_end; ++i) {
      if (layout.removed[i]) continue;
      keep[layout.rank[i]] = true;
      suppress(layout, i, i + 1, block_end, threshold);
      layout.move(i, kept_end++);
    }
    const auto suppress_rest = [&](int64_t from, int64_t to) {
      for (int64_t tile = from; tile < to; tile += kTile) {
        const int64_t tile_end = std::min(tile + kTile, to);
        for (int64_t row = begin; row < kept_end; ++row) {
          suppress(layout, row, tile, tile_end, threshold);
        }
      }
    };
    if (split) {
      parallel_for(block_end, end, kGrain, suppress_rest);
    } else {
      suppress_rest(block_end, end);
    }
    int64_t survivors_end = block_end;
    for (int64_t i = block_end; i < end; ++i) {
      if (layout.removed[i]) continue;
      layout.move(i, survivors_end++);
    }
    std::fill(layout.removed.begin() + block_end, layout.removed.begin() + survivors_end, 0);
    begin = block_end;
    end = survivors_end;
  }
}

template <class acc>
void run_segments(Layout<acc>& layout, acc threshold, bool* keep) {
  std::vector<Segment> small;
  for (const Segment& segment : layout.segments) {
    if (segment.end - segment.begin < kSplitFrom) {
      small.push_back(segment);
    } else {
      run_segment(layout, segment, threshold, true, keep);
    }
  }
  // keep is written at different places by different segments: no two threads share an element.
  const int64_t grain = std::max<int64_t>(
      1,
      static_cast<int64_t>(small.size()) * kSplitFrom / static_cast<int64_t>(layout.rank.size()));
  parallel_for(0, static_cast<int64_t>(small.size()), grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) run_segment(layout, small[i], threshold, false, keep);
  });
}

Tensor run_cpu(const NmsPlan& plan) {
  const std::vector<int64_t> order = score_order(plan);
  const auto n = static_cast<int64_t>(order.size());
  const auto keep = std::make_unique<bool[]>(n);  // by rank
  if (n > 0) {
    dispatch_all(plan.boxes.scalar_type(), plan.op, [&]<class T>() {
      auto layout = lay_out<T>(plan, order);
      run_segments(layout, static_cast<box_acc_t<T>>(plan.iou_threshold), keep.get());
    });
  }
  const int64_t kept =
      std::min<int64_t>(std::count(keep.get(), keep.get() + n, true), plan.max_output);
  Tensor result = empty({kept}, ScalarType::Long, plan.boxes);
  auto* out = mutable_data<int64_t>(result);
  for (int64_t rank = 0, written = 0; written < kept; ++rank) {
    if (keep[rank]) out[written++] = order[rank];
  }
  return result;
}

Tensor nms_cpu(const Tensor& boxes,
               const Tensor& scores,
               double iou_threshold,
               std::optional<double> score_threshold,
               std::optional<int64_t> max_output) {
  return run_cpu(
      plan_nms("nms", boxes, scores, std::nullopt, iou_threshold, score_threshold, max_output));
}

Tensor batched_nms_cpu(const Tensor& boxes,
                       const Tensor& scores,
                       const Tensor& idxs,
                       double iou_threshold,
                       std::optional<double> score_threshold,
                       std::optional<int64_t> max_output) {
  return run_cpu(
      plan_nms("batched_nms", boxes, scores, idxs, iou_threshold, score_threshold, max_output));
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("nms", OPZOO_BOX(opzoo::nms_cpu));
  m.impl("batched_nms", OPZOO_BOX(opzoo::batched_nms_cpu));
}
