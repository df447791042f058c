// SPDX-License-Identifier: Apache-2.0
// Boxes are laid out by class and, within a class, in blocks of near neighbours that know the
// rectangle they cover and their best score. A selection then reads the best scores of all blocks,
// and decays the blocks whose rectangle meets the selected box. Classes run side by side.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "soft_nms/soft_nms_lanes_cpu.h"
#include "soft_nms/soft_nms_plan.h"

namespace opzoo {
namespace {

constexpr int64_t kGrain = 1024;  // boxes worth a thread

template <class acc>
struct Candidate {
  Box<acc> box;
  acc score;
  int64_t index;
};

template <class acc>
struct Selection {
  acc score;
  int64_t index;
};

// What a block covers. Boxes with a NaN coordinate or without an inside overlap nothing, whether
// they count here or not.
template <class acc>
Box<acc> nothing() {
  constexpr acc kInfinity = std::numeric_limits<acc>::infinity();
  return {kInfinity, kInfinity, -kInfinity, -kInfinity};
}

template <class acc>
void include(Box<acc>& rectangle, const Box<acc>& box) {
  rectangle.x1 = std::min(rectangle.x1, box.x1);  // keeps the first where the other is NaN
  rectangle.y1 = std::min(rectangle.y1, box.y1);
  rectangle.x2 = std::max(rectangle.x2, box.x2);
  rectangle.y2 = std::max(rectangle.y2, box.y2);
}

template <class acc>
acc twice_centre(acc low, acc high) {
  const acc sum = low + high;
  return sum == sum ? sum : acc(0);  // NaN has no place in an order
}

// Tiles the plane: strips of equal count along x, each by y. What is near changes no result.
template <class acc>
std::vector<int64_t> order_by_place(const std::vector<Candidate<acc>>& boxes) {
  const auto n = static_cast<int64_t>(boxes.size());
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  const int64_t blocks = div_up<int64_t>(n, kSoftNmsLanes);
  if (blocks == 1) return order;
  std::vector<acc> x(n), y(n);
  for (int64_t i = 0; i < n; ++i) {
    x[i] = twice_centre(boxes[i].box.x1, boxes[i].box.x2);
    y[i] = twice_centre(boxes[i].box.y1, boxes[i].box.y2);
  }
  const auto strips = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(blocks))));
  const int64_t per_strip = div_up(blocks, strips) * kSoftNmsLanes;
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return x[a] < x[b]; });
  for (int64_t begin = 0; begin < n; begin += per_strip) {
    const auto end = order.begin() + std::min(begin + per_strip, n);
    std::sort(order.begin() + begin, end, [&](int64_t a, int64_t b) { return y[a] < y[b]; });
  }
  return order;
}

template <class acc>
struct Layout {
  std::vector<SoftNmsBlock<acc>> blocks;
  std::vector<Box<acc>> rectangles;
  std::vector<acc> best;       // score of each block, -1 where nothing is left
  std::vector<int64_t> index;  // of each lane

  explicit Layout(const std::vector<Candidate<acc>>& boxes)
      : blocks(div_up<int64_t>(boxes.size(), kSoftNmsLanes)),
        rectangles(blocks.size(), nothing<acc>()),
        best(blocks.size(), acc(kSoftNmsGone)),
        index(blocks.size() * kSoftNmsLanes) {
    const std::vector<int64_t> order = order_by_place(boxes);
    for (size_t i = 0; i < index.size(); ++i) {
      const bool used = i < order.size();
      const Candidate<acc> candidate = used ? boxes[order[i]] : Candidate<acc>{{}, kSoftNmsGone, 0};
      const Box<acc>& box = candidate.box;
      const size_t b = i / kSoftNmsLanes, lane = i % kSoftNmsLanes;
      blocks[b].x1[lane] = box.x1;
      blocks[b].y1[lane] = box.y1;
      blocks[b].x2[lane] = box.x2;
      blocks[b].y2[lane] = box.y2;
      blocks[b].area[lane] = box_area(box);
      blocks[b].score[lane] = candidate.score;
      index[i] = candidate.index;
      best[b] = std::max(best[b], candidate.score);
      if (used) include(rectangles[b], box);
    }
  }
};

struct Place {
  size_t block = 0;
  int lane = 0;
};

// Where the best box is: of equal scores the one of smallest index.
template <class acc>
Place place_of(const Layout<acc>& layout, acc score) {
  Place place;
  int64_t smallest = INT64_MAX;
  for (size_t b = 0; b < layout.blocks.size(); ++b) {
    if (layout.best[b] != score) continue;
    for (int lane = 0; lane < kSoftNmsLanes; ++lane) {
      const int64_t index = layout.index[b * kSoftNmsLanes + lane];
      if (layout.blocks[b].score[lane] == score && index < smallest) {
        smallest = index;
        place = {b, lane};
      }
    }
  }
  return place;
}

template <SoftNmsMethod kMethod, class acc>
std::vector<Selection<acc>> run_class(const SoftNmsRule<acc>& rule,
                                      const std::vector<Candidate<acc>>& boxes) {
  std::vector<Selection<acc>> selections;
  if (boxes.empty()) return selections;
  Layout<acc> layout(boxes);
  while (true) {
    const acc score = *std::max_element(layout.best.begin(), layout.best.end());
    if (score < acc(0)) return selections;
    const Place place = place_of(layout, score);
    SoftNmsBlock<acc>& own = layout.blocks[place.block];
    const int lane = place.lane;
    selections.push_back({score, layout.index[place.block * kSoftNmsLanes + lane]});
    const Box<acc> selected{own.x1[lane], own.y1[lane], own.x2[lane], own.y2[lane]};
    own.score[lane] = acc(kSoftNmsGone);
    for (size_t b = 0; b < layout.blocks.size(); ++b) {
      const bool touched =
          soft_nms_may_overlap(layout.rectangles[b], selected) && layout.best[b] >= acc(0);
      if (!touched && b != place.block) continue;
      layout.best[b] = soft_nms_decay_block<kMethod>(rule, selected, layout.blocks[b]);
    }
  }
}

// The boxes that take part, by class: those with a score, in the order of the input.
template <class acc>
std::vector<std::vector<Candidate<acc>>> candidates_of(const SoftNmsPlan& plan) {
  std::vector<int64_t> order(plan.n), ids(plan.n);
  std::iota(order.begin(), order.end(), 0);
  if (plan.classes) {
    const auto* classes = data<int64_t>(*plan.classes);
    for (int64_t i = 0; i < plan.n; ++i) ids[i] = classes[i * plan.classes->stride(0)];
    std::stable_sort(
        order.begin(), order.end(), [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
  }
  std::vector<acc> scores(plan.n);
  const acc min_score = plan.rule<acc>().min_score;
  dispatch_all(plan.scores.scalar_type(), plan.op, [&]<class T>() {
    for (int64_t i = 0; i < plan.n; ++i) {
      scores[i] = soft_nms_score<T, acc>(plan.input, i, min_score);
    }
  });
  std::vector<std::vector<Candidate<acc>>> classes;
  dispatch_all(plan.boxes.scalar_type(), plan.op, [&]<class T>() {
    for (int64_t i = 0; i < plan.n; ++i) {
      if (i == 0 || ids[order[i]] != ids[order[i - 1]]) classes.emplace_back();
      const int64_t index = order[i];
      if (scores[index] < acc(0)) continue;
      classes.back().push_back({soft_nms_box<T, acc>(plan.input, index), scores[index], index});
    }
  });
  return classes;
}

template <class acc>
std::vector<Selection<acc>> merged(const std::vector<std::vector<Selection<acc>>>& classes) {
  std::vector<Selection<acc>> all;
  for (const auto& selections : classes)
    all.insert(all.end(), selections.begin(), selections.end());
  if (classes.size() > 1) {
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
      return a.score > b.score || (a.score == b.score && a.index < b.index);
    });
  }
  return all;
}

using Result = std::tuple<Tensor, Tensor>;

Result run_cpu(const SoftNmsPlan& plan) {
  Tensor scores, indices;
  dispatch_soft_nms(plan, [&]<SoftNmsMethod kMethod, class acc>() {
    const auto classes = candidates_of<acc>(plan);
    const auto count = static_cast<int64_t>(classes.size());
    std::vector<std::vector<Selection<acc>>> selections(classes.size());
    // About kGrain boxes to a thread.
    const int64_t grain = std::max<int64_t>(1, count * kGrain / std::max<int64_t>(1, plan.n));
    parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        selections[i] = run_class<kMethod>(plan.rule<acc>(), classes[i]);
      }
    });
    const auto result = merged(selections);
    const auto kept = static_cast<int64_t>(result.size());
    scores = empty({kept}, plan.result, plan.boxes);
    indices = empty({kept}, ScalarType::Long, plan.boxes);
    auto* index_out = mutable_data<int64_t>(indices);
    for (int64_t i = 0; i < kept; ++i) index_out[i] = result[i].index;
    dispatch_floating(plan.result, plan.op, [&]<class T>() {
      auto* score_out = mutable_data<T>(scores);
      for (int64_t i = 0; i < kept; ++i) score_out[i] = static_cast<T>(result[i].score);
    });
  });
  return {scores, indices};
}

Result soft_nms_cpu(const Tensor& boxes,
                    const Tensor& scores,
                    double iou_threshold,
                    double sigma,
                    double min_score,
                    int64_t method) {
  return run_cpu(plan_soft_nms(
      "soft_nms", boxes, scores, std::nullopt, {iou_threshold, sigma, min_score, method}));
}

Result batched_soft_nms_cpu(const Tensor& boxes,
                            const Tensor& scores,
                            const Tensor& idxs,
                            double iou_threshold,
                            double sigma,
                            double min_score,
                            int64_t method) {
  return run_cpu(plan_soft_nms(
      "batched_soft_nms", boxes, scores, idxs, {iou_threshold, sigma, min_score, method}));
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("soft_nms", OPZOO_BOX(opzoo::soft_nms_cpu));
  m.impl("batched_soft_nms", OPZOO_BOX(opzoo::batched_soft_nms_cpu));
}
