// SPDX-License-Identifier: Apache-2.0
// Two shortcuts, both exact because rounding is monotone (x <= y implies fl(x) <= fl(y)):
//
// Without a division. Let q = inter / union before rounding and t the threshold. fl(q) > t implies
// q > t, since t is a number of the type itself. Then t * union < inter, hence
// fl(t * union) <= inter. So `inter > 0 and inter >= t * union` holds wherever the IoU exceeds t;
// only there is the division done.
//
// Without looking at each box. For a box b within bounds, the overlap's sides are at most those, W
// and H, of the overlap with what encloses the bounds, so inter <= fl(W * H), and inter <= area_b
// <= max_area. On the other side union >= max(area_a, area_b) * (1 - 2^-22), as area_a + area_b is
// at least the larger one plus inter and three roundings lie between. So where min(W * H, max_area)
// < t * (1 - 2^-16) * max(area_a, min_area), no box within the bounds has an IoU above t with a.
// Size and place both count, and no threshold needs special care.
#include "nms/nms_lanes_cpu.h"

#include <algorithm>
#include <limits>

#include "common/lanes_cpu.h"

namespace opzoo {
namespace {

template <class acc>
struct Columns {
  const acc* __restrict__ x1;
  const acc* __restrict__ y1;
  const acc* __restrict__ x2;
  const acc* __restrict__ y2;
  const acc* __restrict__ area;

  explicit Columns(const BoxArrays<acc>& boxes, int64_t first = 0)
      : x1(boxes.x1.data() + first),
        y1(boxes.y1.data() + first),
        x2(boxes.x2.data() + first),
        y2(boxes.y2.data() + first),
        area(boxes.area.data() + first) {}
};

template <class acc>
OPZOO_LANES_INLINE acc larger(acc a, acc b) {
  return a < b ? b : a;
}
template <class acc>
OPZOO_LANES_INLINE acc smaller(acc a, acc b) {
  return b < a ? b : a;
}

// False only where the IoU is not above the threshold.
template <class acc>
OPZOO_LANES_INLINE Flag<acc> may_overlap(
    const Columns<acc>& boxes, int64_t j, const Box<acc>& box, acc area, acc threshold) {
  const acc width = smaller(box.x2, boxes.x2[j]) - larger(box.x1, boxes.x1[j]);
  const acc height = smaller(box.y2, boxes.y2[j]) - larger(box.y1, boxes.y1[j]);
  const acc inter = larger(width, acc(0)) * larger(height, acc(0));
  const acc limit = threshold * (area + boxes.area[j] - inter);
  return Flag<acc>(inter >= limit) & Flag<acc>(inter > acc(0));
}

template <class acc>
OPZOO_LANES_INLINE Flag<acc> overlaps(
    const Columns<acc>& boxes, int64_t j, const Box<acc>& box, acc area, acc threshold) {
  const Box<acc> other{boxes.x1[j], boxes.y1[j], boxes.x2[j], boxes.y2[j]};
  return box_iou(box, area, other, boxes.area[j]) > threshold;
}

// One plain loop each over separate arrays, without a branch, so that the compiler vectorises it.
template <class acc>
OPZOO_LANES_INLINE void suppress_run(const Columns<acc>& boxes,
                                     int64_t count,
                                     const Box<acc>& box,
                                     acc area,
                                     acc threshold,
                                     Flag<acc>* __restrict__ removed) {
  Flag<acc> any = 0;
  for (int64_t j = 0; j < count; ++j) {
    any |= may_overlap(boxes, j, box, area, threshold) & (removed[j] ^ 1);
  }
  if (!any) return;
  for (int64_t j = 0; j < count; ++j) removed[j] |= overlaps(boxes, j, box, area, threshold);
}

template <class acc>
OPZOO_LANES_INLINE void suppress_of(const BoxArrays<acc>& boxes,
                                    int64_t begin,
                                    int64_t end,
                                    const Box<acc>& box,
                                    acc area,
                                    acc threshold,
                                    Flag<acc>* removed) {
  int64_t j = begin;
  for (; j + kTileBoxes <= end; j += kTileBoxes) {
    suppress_run(Columns<acc>(boxes, j), kTileBoxes, box, area, threshold, removed + j);
  }
  suppress_run(Columns<acc>(boxes, j), end - j, box, area, threshold, removed + j);
}

template <class acc>
OPZOO_LANES_INLINE int64_t first_overlap_of(
    const BoxArrays<acc>& boxes, int64_t end, const Box<acc>& box, acc area, acc threshold) {
  for (int64_t run = 0; run < end; run += kTileBoxes) {
    const Columns<acc> columns(boxes, run);
    const int64_t count = std::min(kTileBoxes, end - run);
    Flag<acc> any = 0;
    for (int64_t j = 0; j < count; ++j) any |= may_overlap(columns, j, box, area, threshold);
    if (!any) continue;
    for (int64_t j = 0; j < count; ++j) {
      if (overlaps(columns, j, box, area, threshold)) return run + j;
    }
  }
  return end;
}

// Writes the numbers of the rows that may overlap a box within the bounds; returns how many.
template <class acc>
OPZOO_LANES_INLINE int64_t pick_rows(const Columns<acc>& rows,
                                     int64_t count,
                                     const Bounds<acc>& bounds,
                                     acc threshold,
                                     Flag<acc>* __restrict__ flags,
                                     Flag<acc>* __restrict__ picked) {
  const acc below = threshold * acc(1 - 0x1p-16);
  for (int64_t i = 0; i < count; ++i) {
    const acc width = smaller(rows.x2[i], bounds.x2) - larger(rows.x1[i], bounds.x1);
    const acc height = smaller(rows.y2[i], bounds.y2) - larger(rows.y1[i], bounds.y1);
    const acc most = smaller(larger(width, acc(0)) * larger(height, acc(0)), bounds.max_area);
    const acc least = below * larger(rows.area[i], bounds.min_area);
    flags[i] = Flag<acc>(most >= least) & Flag<acc>(most > acc(0));
  }
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    picked[found] = static_cast<Flag<acc>>(i);
    found += flags[i];
  }
  return found;
}

template <class acc>
OPZOO_LANES_INLINE void suppress_group_of(Tiles<acc>& tiles,
                                          int64_t group,
                                          const BoxArrays<acc>& rows,
                                          int64_t count,
                                          acc threshold,
                                          BoxArrays<acc>& near,
                                          Flag<acc>* scratch) {
  if (tiles.tiles_gone[group] == kGroupTiles) return;
  Flag<acc>* const picked = scratch + count;
  const int64_t near_count =
      pick_rows(Columns<acc>(rows), count, tiles.group_bounds[group], threshold, scratch, picked);
  for (int64_t i = 0; i < near_count; ++i) near.copy(i, rows, picked[i]);
  const Columns<acc> near_rows(near);
  for (int64_t tile = group * kGroupTiles; tile < (group + 1) * kGroupTiles; ++tile) {
    if (tiles.tile_gone[tile]) continue;
    const int64_t found =
        pick_rows(near_rows, near_count, tiles.tile_bounds[tile], threshold, scratch, picked);
    if (found == 0) continue;
    const Columns<acc> boxes(tiles.boxes, tile * kTileBoxes);
    Flag<acc>* const removed = tiles.removed.data() + tile * kTileBoxes;
    for (int64_t i = 0; i < found; ++i) {
      const int64_t row = picked[i];
      suppress_run(boxes, kTileBoxes, near.box(row), near.area[row], threshold, removed);
    }
    Flag<acc> gone = 0;
    for (int64_t j = 0; j < kTileBoxes; ++j) gone += removed[j];
    if (gone == kTileBoxes) {
      tiles.tile_gone[tile] = 1;
      ++tiles.tiles_gone[group];
    }
  }
}

template <class acc>
Bounds<acc> nothing() {
  constexpr acc kInf = std::numeric_limits<acc>::infinity();
  return {kInf, kInf, -kInf, -kInf, kInf, 0};
}

template <class acc>
void enlarge(Bounds<acc>& bounds, const Bounds<acc>& by) {
  bounds.x1 = smaller(bounds.x1, by.x1);
  bounds.y1 = smaller(bounds.y1, by.y1);
  bounds.x2 = larger(bounds.x2, by.x2);
  bounds.y2 = larger(bounds.y2, by.y2);
  bounds.min_area = smaller(bounds.min_area, by.min_area);
  bounds.max_area = larger(bounds.max_area, by.max_area);
}

}  // namespace

template <class acc>
Tiles<acc>::Tiles(int64_t n)
    : boxes(div_up(n, kGroupBoxes) * kGroupBoxes),
      removed(boxes.size(), 1),
      tile_bounds(boxes.size() / kTileBoxes, nothing<acc>()),
      group_bounds(boxes.size() / kGroupBoxes, nothing<acc>()),
      tile_gone(tile_bounds.size(), 0),
      tiles_gone(group_bounds.size(), 0) {
  std::fill_n(removed.begin(), n, 0);
}

template <class acc>
void Tiles<acc>::bound() {
  for (int64_t i = 0; i < boxes.size(); ++i) {
    if (removed[i]) continue;
    const acc area = boxes.area[i];
    enlarge(tile_bounds[i / kTileBoxes],
            {boxes.x1[i], boxes.y1[i], boxes.x2[i], boxes.y2[i], area, area});
  }
  for (size_t tile = 0; tile < tile_bounds.size(); ++tile) {
    enlarge(group_bounds[tile / kGroupTiles], tile_bounds[tile]);
  }
}

#define OPZOO_NMS_DEFINE(acc)                                                                   \
  template struct Tiles<acc>;                                                                   \
  template <>                                                                                   \
  OPZOO_LANES_KERNEL void suppress<acc>(const BoxArrays<acc>& boxes,                            \
                                        int64_t begin,                                          \
                                        int64_t end,                                            \
                                        const Box<acc>& box,                                    \
                                        acc area,                                               \
                                        acc threshold,                                          \
                                        Flag<acc>* removed) {                                   \
    suppress_of(boxes, begin, end, box, area, threshold, removed);                              \
  }                                                                                             \
  template <>                                                                                   \
  OPZOO_LANES_KERNEL int64_t first_overlap<acc>(                                                \
      const BoxArrays<acc>& boxes, int64_t end, const Box<acc>& box, acc area, acc threshold) { \
    return first_overlap_of(boxes, end, box, area, threshold);                                  \
  }                                                                                             \
  template <>                                                                                   \
  OPZOO_LANES_KERNEL void suppress_group<acc>(Tiles<acc> & tiles,                               \
                                              int64_t group,                                    \
                                              const BoxArrays<acc>& rows,                       \
                                              int64_t count,                                    \
                                              acc threshold,                                    \
                                              BoxArrays<acc>& near,                             \
                                              Flag<acc>* scratch) {                             \
    suppress_group_of(tiles, group, rows, count, threshold, near, scratch);                     \
  }
OPZOO_NMS_DEFINE(float)
OPZOO_NMS_DEFINE(double)

}  // namespace opzoo
