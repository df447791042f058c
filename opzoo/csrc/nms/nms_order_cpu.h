// SPDX-License-Identifier: Apache-2.0
// Sorting by integer keys on the CPU. No torch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "common/types.h"

namespace opzoo {

struct Keyed {
  uint64_t key;
  int64_t index;
};

// Ascending as the signed integer.
inline uint64_t ascending(int64_t key) {
  return static_cast<uint64_t>(key) ^ 0x8000000000000000u;
}

// Ascending as the number, which must not be NaN.
inline uint64_t ascending(double value) {
  const auto bits = bit_cast<int64_t>(value);
  return ascending(bits >= 0 ? bits : bits ^ INT64_MAX);
}

// Stable, by key ascending. Radix sort from the lowest digit, over the bits that differ at all.
inline void sort_by_key(std::vector<Keyed>& entries) {
  constexpr size_t kComparisonsBelow = 512;  // a histogram costs more than they do
  if (entries.size() < kComparisonsBelow) {
    std::stable_sort(entries.begin(), entries.end(), [](const Keyed& left, const Keyed& right) {
      return left.key < right.key;
    });
    return;
  }
  uint64_t differ = 0;
  for (const Keyed& entry : entries) differ |= entry.key ^ entries[0].key;
  constexpr int kDigitBits = 11;
  constexpr uint64_t kDigits = uint64_t(1) << kDigitBits;
  std::vector<Keyed> other(entries.size());
  for (int shift = 0; shift < 64 && differ >> shift;) {
    if (!(differ >> shift & 1)) {
      ++shift;
      continue;
    }
    std::array<size_t, kDigits> place{};
    for (const Keyed& entry : entries) ++place[entry.key >> shift & (kDigits - 1)];
    size_t sum = 0;
    for (size_t& start : place) {
      const size_t count = start;
      start = sum;
      sum += count;
    }
    for (const Keyed& entry : entries) other[place[entry.key >> shift & (kDigits - 1)]++] = entry;
    entries.swap(other);
    shift += kDigitBits;
  }
}

}  // namespace opzoo
