// SPDX-License-Identifier: Apache-2.0
// The inner loops of NMS on the CPU, over boxes kept as separate arrays. Every function exists for
// the widest vectors of the machine and rounds alike for all. Defined in nms_lanes_cpu.cpp for
// float and double.
#pragma once

#include <vector>

#include "nms/nms.h"

namespace opzoo {

// As wide as a coordinate: then a vector register holds as many flags as boxes.
template <class acc>
using Flag = std::conditional_t<sizeof(acc) == 8, int64_t, int32_t>;

constexpr int64_t kTileBoxes = 64;
constexpr int64_t kGroupTiles = 16;
constexpr int64_t kGroupBoxes = kTileBoxes * kGroupTiles;

template <class acc>
struct BoxArrays {
  std::vector<acc> x1, y1, x2, y2, area;

  BoxArrays() = default;
  explicit BoxArrays(int64_t n) { resize(n); }

  void resize(int64_t n) {
    for (auto* column : {&x1, &y1, &x2, &y2, &area}) column->resize(n);
  }
  int64_t size() const { return static_cast<int64_t>(x1.size()); }
  Box<acc> box(int64_t i) const { return {x1[i], y1[i], x2[i], y2[i]}; }
  void set(int64_t i, const Box<acc>& box, acc its_area) {
    x1[i] = box.x1;
    y1[i] = box.y1;
    x2[i] = box.x2;
    y2[i] = box.y2;
    area[i] = its_area;
  }
  void copy(int64_t to, const BoxArrays& from, int64_t i) { set(to, from.box(i), from.area[i]); }
};

// What encloses a set of boxes, and the range of their areas.
template <class acc>
struct Bounds {
  acc x1, y1, x2, y2, min_area, max_area;
};

// Boxes in tiles of kTileBoxes and groups of kGroupTiles tiles. The last group is filled up with
// boxes of area 0 that are removed from the start.
template <class acc>
struct Tiles {
  BoxArrays<acc> boxes;
  std::vector<Flag<acc>> removed;
  std::vector<Bounds<acc>> tile_bounds, group_bounds;
  std::vector<char> tile_gone;      // all its boxes are removed
  std::vector<int64_t> tiles_gone;  // by group

  explicit Tiles(int64_t n);  // places for n boxes
  void bound();               // after the boxes are set
  int64_t groups() const { return static_cast<int64_t>(group_bounds.size()); }
};

// removed[j] |= IoU(box, boxes[j]) > threshold, for j in [begin, end).
template <class acc>
void suppress(const BoxArrays<acc>& boxes,
              int64_t begin,
              int64_t end,
              const Box<acc>& box,
              acc area,
              acc threshold,
              Flag<acc>* removed);

// The first j in [0, end) with IoU(box, boxes[j]) > threshold; end where there is none.
template <class acc>
int64_t first_overlap(
    const BoxArrays<acc>& boxes, int64_t end, const Box<acc>& box, acc area, acc threshold);

// All boxes of a group that overlap one of the first `count` rows are removed. `near` is scratch of
// the same size as rows, `picked` of 2 * count.
template <class acc>
void suppress_group(Tiles<acc>& tiles,
                    int64_t group,
                    const BoxArrays<acc>& rows,
                    int64_t count,
                    acc threshold,
                    BoxArrays<acc>& near,
                    Flag<acc>* picked);

}  // namespace opzoo
