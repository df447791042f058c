// SPDX-License-Identifier: Apache-2.0
// add(a, b, alpha): out = a + alpha * b, element by element.
//
//   a, b    any shapes that broadcast, any strides, any real dtypes (integers and bool included)
//   out     the broadcast shape; dtype by torch's promotion rules; the strides of the first operand
//           that has the full shape and is dense, plain contiguous otherwise
//
// Arithmetic: fp32 for 16- and 32-bit floats, fp64 for fp64, int64 (wrapping) for integers. A 0-d
// operand on the CPU is a number: it may join a CUDA tensor and is not rounded to the result's
// dtype before the sum. NaN and inf follow IEEE. Deterministic. No torch in this file.
#pragma once

#include "common/strided.h"
#include "common/types.h"

namespace opzoo {

enum AddOperand { kAddOut = 0, kAddA = 1, kAddB = 2 };

// A tensor operand has data; a number has value_float or value_int instead.
struct AddInput {
  const void* data = nullptr;
  double value_float = 0;
  int64_t value_int = 0;
};

struct AddParams {
  StridedLoop<3> loop;
  AddInput a, b;
  void* out = nullptr;
  double alpha = 1;
};

template <class T>
OPZOO_HOST_DEVICE acc_t<T> add_number(const AddInput& input) {
  if constexpr (std::is_integral_v<T>) {
    return input.value_int;
  } else {
    return static_cast<acc_t<T>>(input.value_float);
  }
}

// The whole operator.
template <class T>
OPZOO_HOST_DEVICE T add_value(acc_t<T> a, acc_t<T> b, acc_t<T> alpha) {
  if constexpr (std::is_integral_v<T>) {
    // Unsigned, because signed overflow is undefined in C++ and wraps in torch; as wide as the
    // result needs, because a vector holds twice as many 32-bit products. (bool asks whether any
    // bit is set.)
    using word = std::conditional_t<sizeof(T) <= 4 && !std::is_same_v<T, bool>, uint32_t, uint64_t>;
    return static_cast<T>(static_cast<word>(a) + static_cast<word>(alpha) * static_cast<word>(b));
  } else {
    return static_cast<T>(a + alpha * b);
  }
}

}  // namespace opzoo
