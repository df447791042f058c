// SPDX-License-Identifier: Apache-2.0
#if defined(__GNUC__) && !defined(__clang__)
// A selection may compute both its sides, whatever floating-point flags that raises: only then do
// the loops vectorise. No value depends on it.
#pragma GCC optimize("no-trapping-math")
#endif

#include "soft_nms/soft_nms_lanes_cpu.h"

#include "common/lanes_cpu.h"

namespace opzoo {
namespace {

// Loops without a branch over separate arrays, so that the compiler vectorises them.
template <SoftNmsMethod kMethod, class acc>
OPZOO_LANES_INLINE acc decay_block(const SoftNmsRule<acc>& rule,
                                   const Box<acc>& selected,
                                   SoftNmsBlock<acc>& block) {
  using Bits = std::conditional_t<sizeof(acc) == 8, int64_t, int32_t>;
  const acc area = box_area(selected);
  const acc threshold = rule.iou_threshold, min_score = rule.min_score;
  const SoftNmsRule<acc> local{threshold, min_score, rule.sigma};
  acc factor[kSoftNmsLanes];
  for (int i = 0; i < kSoftNmsLanes; ++i) {
    const Box<acc> box{block.x1[i], block.y1[i], block.x2[i], block.y2[i]};
    factor[i] = box_iou(selected, area, box, block.area[i]);
  }
  for (int i = 0; i < kSoftNmsLanes; ++i) factor[i] = soft_nms_factor<kMethod>(local, factor[i]);
  for (int i = 0; i < kSoftNmsLanes; ++i) {
    const acc decayed = soft_nms_decayed(local, block.score[i], factor[i]);
    block.score[i] = block.score[i] >= acc(0) ? decayed : acc(kSoftNmsGone);
  }
  // As integers, whose maximum may be taken in any order. Scores that take part are >= +0.
  Bits best = INT32_MIN;
  for (int i = 0; i < kSoftNmsLanes; ++i) {
    const Bits bits = bit_cast<Bits>(block.score[i]);
    best = bits > best ? bits : best;
  }
  return best >= 0 ? bit_cast<acc>(best) : acc(kSoftNmsGone);
}

}  // namespace

// Function multiversioning takes no templates: a specialisation for each method and type.
#define OPZOO_DEFINE(kMethod, acc)                                                        \
  template <>                                                                             \
  OPZOO_LANES_KERNEL acc soft_nms_decay_block<kMethod, acc>(                              \
      const SoftNmsRule<acc>& rule, const Box<acc>& selected, SoftNmsBlock<acc>& block) { \
    return decay_block<kMethod>(rule, selected, block);                                   \
  }
OPZOO_DEFINE(SoftNmsMethod::kNaive, float)
OPZOO_DEFINE(SoftNmsMethod::kNaive, double)
OPZOO_DEFINE(SoftNmsMethod::kLinear, float)
OPZOO_DEFINE(SoftNmsMethod::kLinear, double)
OPZOO_DEFINE(SoftNmsMethod::kGaussian, float)
OPZOO_DEFINE(SoftNmsMethod::kGaussian, double)

}  // namespace opzoo
