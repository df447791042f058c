// SPDX-License-Identifier: Apache-2.0
// The inner loop of soft-NMS on the CPU: one selected box against a block of boxes. It exists for
// the widest vectors of the machine; no lane depends on another, so the result depends on neither.
// Defined in soft_nms_lanes_cpu.cpp for every method and both types.
#pragma once

#include "soft_nms/soft_nms.h"

namespace opzoo {

constexpr int kSoftNmsLanes = 64;  // boxes of a block

// Boxes near each other, coordinate by coordinate. Those that are gone have the score -1.
template <class acc>
struct SoftNmsBlock {
  acc x1[kSoftNmsLanes], y1[kSoftNmsLanes], x2[kSoftNmsLanes], y2[kSoftNmsLanes];
  acc area[kSoftNmsLanes];
  acc score[kSoftNmsLanes];
};

// Decays the scores of the block by the selection of a box; returns the best score left, -1 for
// none.
template <SoftNmsMethod kMethod, class acc>
acc soft_nms_decay_block(const SoftNmsRule<acc>& rule,
                         const Box<acc>& selected,
                         SoftNmsBlock<acc>& block);

}  // namespace opzoo
