// SPDX-License-Identifier: Apache-2.0
// Boxes are laid out by class and, within a class, in score order: one segment per class, which no
// other class touches. Small segments are worked off box by box. Large ones are first sorted into
// tiles of neighbours, then taken in blocks of the best boxes that are left:
//   1. the block's boxes suppress each other, one after another;
//   2. those that stay suppress the boxes of the tiles they reach, in any order.
// Nothing depends on how step 2 is split among threads, and a chain in which every box suppresses
// the next takes as many blocks as any other input.
#include <cmath>
#include <memory>

#include "nms/nms_lanes_cpu.h"
#include "nms/nms_order_cpu.h"
#include "nms/nms_plan.h"

namespace opzoo {
namespace {

constexpr int64_t kTiledFrom = 1024;   // below, sorting into tiles costs more than it saves
constexpr int64_t kBlockRows = 512;    // at most: rows and one tile stay in L1
constexpr int64_t kLeastRows = 64;     // at least: each block of rows visits all tiles
constexpr int64_t kRowsShare = 32;     // in between this part of a segment: a block is all pairs
constexpr int64_t kSplitFrom = 65536;  // a segment this large is worth several threads
constexpr int64_t kGroupGrain = 4;     // groups of tiles that are worth a thread
constexpr int64_t kCopyGrain = 16384;  // boxes whose copies are

// The boxes of an image that take part, best first.
std::vector<Keyed> score_order(const NmsPlan& plan, int64_t image) {
  std::vector<Keyed> order;
  order.reserve(plan.n);
  dispatch_all(plan.scores.scalar_type(), plan.op, [&]<class T>() {
    for (int64_t i = 0; i < plan.n; ++i) {
      const int64_t key = score_key(load_number<T>(plan.scores_view, image, i));
      if (plan.score_limit.admits(key)) order.push_back({~ascending(key), i});
    }
  });
  sort_by_key(order);
  return order;
}

template <class acc>
struct Layout {
  BoxArrays<acc> boxes;
  std::vector<int64_t> rank;    // place in score order; empty where it is the place here
  std::vector<int64_t> starts;  // of the segments, and the end of the last
};

// body(begin, end) over [0, count), on several threads or on this one.
template <class Body>
void for_ranges(int64_t count, int64_t grain, bool split, const Body& body) {
  if (split) {
    parallel_for(0, count, grain, body);
  } else {
    body(0, count);
  }
}

template <class T, class acc = box_acc_t<T>>
Layout<acc> lay_out(const NmsPlan& plan,
                    int64_t image,
                    const std::vector<Keyed>& order,
                    bool split) {
  const auto n = static_cast<int64_t>(order.size());
  Layout<acc> layout;
  layout.boxes.resize(n);
  layout.starts.push_back(0);
  if (plan.classes) {
    std::vector<Keyed> by_class(n);
    for_ranges(n, kCopyGrain, split, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto id = load_number<int64_t>(plan.classes_view, image, order[i].index);
        by_class[i] = {ascending(id), i};
      }
    });
    sort_by_key(by_class);
    layout.rank.resize(n);
    for (int64_t i = 0; i < n; ++i) {
      layout.rank[i] = by_class[i].index;
      if (i > 0 && by_class[i].key != by_class[i - 1].key) layout.starts.push_back(i);
    }
  }
  layout.starts.push_back(n);
  for_ranges(n, kCopyGrain, split, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t rank = plan.classes ? layout.rank[i] : i;
      const Box<acc> box = load_box<T>(plan.boxes_view, image, order[rank].index);
      layout.boxes.set(i, box, box_area(box));
    }
  });
  return layout;
}

// A segment, and where its result goes.
template <class acc>
struct Job {
  const BoxArrays<acc>& boxes;
  int64_t begin, end;
  acc threshold;
  int64_t limit;  // kept boxes that are enough
  char* keep;     // by place
};

template <class acc>
void run_small(const Job<acc>& job) {
  const auto& boxes = job.boxes;
  const int64_t count = job.end - job.begin;
  BoxArrays<acc> own(count);  // contiguous, and in L1
  for (int64_t i = 0; i < count; ++i) own.copy(i, boxes, job.begin + i);
  std::vector<Flag<acc>> removed(count, 0);
  int64_t kept = 0;
  for (int64_t i = 0; i < count && kept < job.limit; ++i) {
    if (removed[i]) continue;
    job.keep[job.begin + i] = 1;
    ++kept;
    suppress(own, i + 1, count, own.box(i), own.area[i], job.threshold, removed.data());
  }
}

// Neighbours side by side (sort-tile-recursive): strips of equal count along x, each sorted along
// y. By counts, not by coordinates, so one far box changes nothing. Keys are cut to 12 bits of
// mantissa: the order decides about speed alone.
template <class acc>
std::vector<int64_t> spatial_order(const Job<acc>& job) {
  constexpr int kCutBits = 40;
  const auto& boxes = job.boxes;
  const auto key = [](acc low, acc high) {
    return ascending(static_cast<double>(low) + static_cast<double>(high)) >> kCutBits;
  };
  std::vector<Keyed> entries;
  entries.reserve(job.end - job.begin);
  for (int64_t i = job.begin; i < job.end; ++i) {
    if (!can_overlap(boxes.box(i), boxes.area[i])) continue;
    entries.push_back({key(boxes.x1[i], boxes.x2[i]), i});
  }
  sort_by_key(entries);
  const auto count = static_cast<int64_t>(entries.size());
  const auto tiles = static_cast<double>(div_up(count, kTileBoxes));
  const int64_t strip = std::max<int64_t>(1, std::llround(std::sqrt(tiles))) * kTileBoxes;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = entries[i].index;
    const auto number = static_cast<uint64_t>(i / strip);
    entries[i].key = number << (64 - kCutBits) | key(boxes.y1[place], boxes.y2[place]);
  }
  sort_by_key(entries);
  std::vector<int64_t> order(count);
  for (int64_t i = 0; i < count; ++i) order[i] = entries[i].index;
  return order;
}

template <class acc>
void suppress_tiles(
    Tiles<acc>& tiles, const BoxArrays<acc>& rows, int64_t count, acc threshold, bool split) {
  const auto body = [&](int64_t begin, int64_t end) {
    BoxArrays<acc> near(count);
    std::vector<Flag<acc>> scratch(2 * count + 1);
    for (int64_t group = begin; group < end; ++group) {
      suppress_group(tiles, group, rows, count, threshold, near, scratch.data());
    }
  };
  for_ranges(tiles.groups(), kGroupGrain, split, body);
}

template <class acc>
void run_tiled(const Job<acc>& job, bool split) {
  constexpr int64_t kNone = -1;
  const std::vector<int64_t> order = spatial_order(job);
  const auto count = static_cast<int64_t>(order.size());
  Tiles<acc> tiles(count);
  std::vector<int64_t> position(job.end - job.begin, kNone);
  for (int64_t i = 0; i < count; ++i) {
    tiles.boxes.copy(i, job.boxes, order[i]);
    position[order[i] - job.begin] = i;
  }
  tiles.bound();

  const int64_t block_rows = std::clamp(count / kRowsShare, kLeastRows, kBlockRows);
  BoxArrays<acc> rows(block_rows);
  std::vector<int64_t> places(block_rows);
  std::vector<Flag<acc>> removed(block_rows);
  int64_t kept = 0;
  for (int64_t next = job.begin; next < job.end && kept < job.limit;) {
    int64_t block = 0;
    for (; next < job.end && block < block_rows; ++next) {
      const int64_t i = position[next - job.begin];
      if (i == kNone) {
        job.keep[next] = 1;
        ++kept;
      } else if (!tiles.removed[i]) {
        tiles.removed[i] = 1;  // decided below
        rows.copy(block, job.boxes, next);
        places[block++] = next;
      }
    }
    std::fill_n(removed.begin(), block, 0);
    int64_t block_kept = 0;
    for (int64_t i = 0; i < block; ++i) {
      if (removed[i]) continue;
      job.keep[places[i]] = 1;
      suppress(rows, i + 1, block, rows.box(i), rows.area[i], job.threshold, removed.data());
      rows.copy(block_kept++, rows, i);
    }
    kept += block_kept;
    suppress_tiles(tiles, rows, block_kept, job.threshold, split);
  }
}

// Large segments are split among threads, the others run side by side, about as many boxes to a
// thread.
template <class acc>
void run_segments(const Layout<acc>& layout, acc threshold, int64_t limit, bool split, char* keep) {
  std::vector<Job<acc>> jobs;
  const int64_t split_from = split ? kSplitFrom : INT64_MAX;
  for (size_t i = 0; i + 1 < layout.starts.size(); ++i) {
    const Job<acc> job{
        layout.boxes, layout.starts[i], layout.starts[i + 1], threshold, limit, keep};
    if (job.end - job.begin >= split_from) {
      run_tiled(job, true);
    } else {
      jobs.push_back(job);
    }
  }
  const auto run = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (jobs[i].end - jobs[i].begin >= kTiledFrom) {
        run_tiled(jobs[i], false);
      } else {
        run_small(jobs[i]);
      }
    }
  };
  const auto count = static_cast<int64_t>(jobs.size());
  const int64_t boxes = std::max<int64_t>(1, layout.boxes.size());
  const int64_t grain = std::max<int64_t>(1, count * kTiledFrom / boxes);
  for_ranges(count, grain, split, run);
}

// The kept boxes of an image in score order, at most max_output.
std::vector<int64_t> select(const NmsPlan& plan, int64_t image, bool split) {
  std::vector<int64_t> kept;
  if (plan.max_output == 0) return kept;
  const std::vector<Keyed> order = score_order(plan, image);
  const auto n = static_cast<int64_t>(order.size());
  std::vector<char> keep(n);  // by rank
  dispatch_all(plan.boxes.scalar_type(), plan.op, [&]<class T>() {
    using acc = box_acc_t<T>;
    const auto threshold = static_cast<acc>(plan.iou_threshold);
    if (threshold == 1) {  // no IoU is above it: inter is at most either area
      std::fill(keep.begin(), keep.end(), 1);
      return;
    }
    const Layout<acc> layout = lay_out<T>(plan, image, order, split);
    if (layout.rank.empty()) {
      run_segments(layout, threshold, plan.max_output, split, keep.data());
      return;
    }
    std::vector<char> by_place(n);
    run_segments(layout, threshold, plan.max_output, split, by_place.data());
    for (int64_t i = 0; i < n; ++i) keep[layout.rank[i]] = by_place[i];
  });
  for (int64_t i = 0; i < n; ++i) {
    if (!keep[i]) continue;
    kept.push_back(order[i].index);
    if (static_cast<int64_t>(kept.size()) == plan.max_output) break;
  }
  return kept;
}

Tensor run_cpu(const NmsPlan& plan) {
  const std::vector<int64_t> kept = select(plan, 0, true);
  Tensor result = empty({static_cast<int64_t>(kept.size())}, ScalarType::Long, plan.boxes);
  std::copy(kept.begin(), kept.end(), mutable_data<int64_t>(result));
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

std::tuple<Tensor, Tensor> nms_padded_cpu(const Tensor& boxes,
                                          const Tensor& scores,
                                          double iou_threshold,
                                          int64_t max_output,
                                          const OptionalTensor& idxs,
                                          std::optional<double> score_threshold) {
  const NmsPlan plan =
      plan_nms_padded(boxes, scores, iou_threshold, max_output, idxs, score_threshold);
  Sizes sizes = plan.batch_sizes;
  Tensor count = empty(sizes, ScalarType::Long, plan.boxes);
  sizes.push_back(max_output);
  Tensor indices = empty(sizes, ScalarType::Long, plan.boxes);
  auto* counts = mutable_data<int64_t>(count);
  auto* rows = mutable_data<int64_t>(indices);
  const auto run = [&](int64_t begin, int64_t end, bool split) {
    for (int64_t image = begin; image < end; ++image) {
      const std::vector<int64_t> kept = select(plan, image, split);
      int64_t* const row = rows + image * max_output;
      std::fill(std::copy(kept.begin(), kept.end(), row), row + max_output, -1);
      counts[image] = static_cast<int64_t>(kept.size());
    }
  };
  if (plan.images == 1) {
    run(0, 1, true);
  } else {
    const int64_t grain = std::max<int64_t>(1, kTiledFrom / std::max<int64_t>(1, plan.n));
    parallel_for(
        0, plan.images, grain, [&](int64_t begin, int64_t end) { run(begin, end, false); });
  }
  return {indices, count};
}

Tensor nms_leaders_cpu(const Tensor& boxes, const Tensor& scores, double iou_threshold) {
  const NmsPlan plan = plan_nms(
      "_nms_leaders", boxes, scores, std::nullopt, iou_threshold, std::nullopt, std::nullopt);
  constexpr int64_t kGrain = 256;
  const std::vector<int64_t> kept = select(plan, 0, true);
  Tensor result = empty({plan.n}, ScalarType::Long, plan.boxes);
  auto* leaders = mutable_data<int64_t>(result);
  std::fill_n(leaders, plan.n, int64_t{-1});
  for (const int64_t index : kept) leaders[index] = index;
  dispatch_all(plan.boxes.scalar_type(), plan.op, [&]<class T>() {
    using acc = box_acc_t<T>;
    const auto count = static_cast<int64_t>(kept.size());
    BoxArrays<acc> rows(count);
    for (int64_t i = 0; i < count; ++i) {
      const Box<acc> box = load_box<T>(plan.boxes_view, 0, kept[i]);
      rows.set(i, box, box_area(box));
    }
    const auto threshold = static_cast<acc>(plan.iou_threshold);
    parallel_for(0, plan.n, kGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (leaders[i] >= 0) continue;
        const Box<acc> box = load_box<T>(plan.boxes_view, 0, i);
        leaders[i] = kept[first_overlap(rows, count, box, box_area(box), threshold)];
      }
    });
  });
  return result;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("nms", OPZOO_BOX(opzoo::nms_cpu));
  m.impl("batched_nms", OPZOO_BOX(opzoo::batched_nms_cpu));
  m.impl("nms_padded", OPZOO_BOX(opzoo::nms_padded_cpu));
  m.impl("_nms_leaders", OPZOO_BOX(opzoo::nms_leaders_cpu));
}
