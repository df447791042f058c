// SPDX-License-Identifier: Apache-2.0
// Vectors of kLaneStep elements for loops on the CPU, in the compiler's own vector types: one
// source for every instruction set, operator by operator the same bits as the scalar loop. No
// torch.
#pragma once

#include "common/types.h"

namespace opzoo {

// Loops over lanes take multiples of this at a time.
constexpr int64_t kLaneStep = 8;

// A function with OPZOO_LANES_KERNEL is compiled twice, the right one picked when the library
// loads; what it calls is OPZOO_LANES_INLINE. No template takes the attribute: mark a plain
// function or a specialisation. Without FMA: products are rounded on every machine, and the loads
// are what these loops wait for.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define OPZOO_LANES_KERNEL __attribute__((target_clones("avx2", "default"), noinline))
#else
#define OPZOO_LANES_KERNEL
#endif
#define OPZOO_LANES_INLINE __attribute__((always_inline)) inline

template <class Element, int kCount>
struct VectorOf {
  typedef Element type
      __attribute__((vector_size(kCount * sizeof(Element)), aligned(alignof(Element)), may_alias));
};
template <class acc>
using Lanes = typename VectorOf<acc, kLaneStep>::type;
using Words = VectorOf<int32_t, kLaneStep>::type;
using UnsignedWords = VectorOf<uint32_t, kLaneStep>::type;
using HalfWords = VectorOf<uint16_t, kLaneStep>::type;
using HalfPairs = VectorOf<uint16_t, 2 * kLaneStep>::type;

// Vectors travel by reference: by value they would change the ABI with the instruction set.
OPZOO_LANES_INLINE void load(const float* from, Lanes<float>& to) {
  to = *reinterpret_cast<const Lanes<float>*>(from);
}
OPZOO_LANES_INLINE void load(const double* from, Lanes<double>& to) {
  to = *reinterpret_cast<const Lanes<double>*>(from);
}
OPZOO_LANES_INLINE void store(const Lanes<float>& from, float* to) {
  *reinterpret_cast<Lanes<float>*>(to) = from;
}
OPZOO_LANES_INLINE void store(const Lanes<double>& from, double* to) {
  *reinterpret_cast<Lanes<double>*>(to) = from;
}

// The conversions of common/types.h, branches turned into selections.
OPZOO_LANES_INLINE void load(const Half* from, Lanes<float>& to) {
  const Words half = __builtin_convertvector(*reinterpret_cast<const HalfWords*>(from), Words);
  const Words magnitude = half & 0x7fff;
  const Words special = 0x7f800000 | (magnitude & 0x3ff) << 13;
  const Lanes<float> scaled = reinterpret_cast<Lanes<float>>(magnitude << 13) * 0x1p112f;
  const Words word = magnitude >= 0x7c00 ? special : reinterpret_cast<Words>(scaled);
  to = reinterpret_cast<Lanes<float>>(word | (half & 0x8000) << 16);
}
OPZOO_LANES_INLINE void load(const BFloat16* from, Lanes<float>& to) {
  const Words bits = __builtin_convertvector(*reinterpret_cast<const HalfWords*>(from), Words);
  to = reinterpret_cast<Lanes<float>>(bits << 16);
}
OPZOO_LANES_INLINE void store(const Lanes<float>& from, Half* to) {
  const Words word = reinterpret_cast<Words>(from);
  const Words magnitude = word & 0x7fffffff;
  const Lanes<float> shifted = reinterpret_cast<Lanes<float>>(magnitude) + 0.5f;
  const Words subnormal = reinterpret_cast<Words>(shifted) - 0x3f000000;
  const Words normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  Words half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? half * 0 + 0x7c00 : half;
  half = magnitude > 0x7f800000 ? half * 0 + 0x7e00 : half;
  half |= word >> 16 & 0x8000;
  *reinterpret_cast<HalfWords*>(to) = __builtin_convertvector(half, HalfWords);
}
OPZOO_LANES_INLINE void round_to_bfloat16(const Lanes<float>& from, UnsignedWords& half) {
  const UnsignedWords word = reinterpret_cast<UnsignedWords>(from);
  const UnsignedWords rounded = (word + 0x7fffu + (word >> 16 & 1u)) >> 16;
  half = from != from ? (word >> 16 | 0x40u) : rounded;
}
OPZOO_LANES_INLINE void store(const Lanes<float>& from, BFloat16* to) {
  UnsignedWords half;
  round_to_bfloat16(from, half);
  *reinterpret_cast<HalfWords*>(to) = __builtin_convertvector(half, HalfWords);
}

// 2 * kLaneStep neighbours at once, those of even and of odd number apart: half the instructions,
// since a word of two bfloat16 is taken apart by a shift and a mask and nothing crosses a lane.
OPZOO_LANES_INLINE void load_pairs(const BFloat16* from, Lanes<float>& even, Lanes<float>& odd) {
  const auto words = reinterpret_cast<UnsignedWords>(*reinterpret_cast<const HalfPairs*>(from));
  even = reinterpret_cast<Lanes<float>>(words << 16);
  odd = reinterpret_cast<Lanes<float>>(words & 0xffff0000u);
}
OPZOO_LANES_INLINE void store_pairs(const Lanes<float>& even,
                                    const Lanes<float>& odd,
                                    BFloat16* to) {
  UnsignedWords low, high;
  round_to_bfloat16(even, low);
  round_to_bfloat16(odd, high);
  *reinterpret_cast<HalfPairs*>(to) = reinterpret_cast<HalfPairs>(low | high << 16);
}

}  // namespace opzoo
