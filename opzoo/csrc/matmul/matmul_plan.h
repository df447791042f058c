// SPDX-License-Identifier: Apache-2.0
// The device-independent half of matmul: checks, result, parameters. Defined in matmul.cpp.
#pragma once

#include "common/dispatch.h"
#include "matmul/matmul.h"

namespace opzoo {

// What fp32 products on the tensor cores of a GPU may cost in accuracy. Everything else ignores it.
enum class MatmulPrecision : int64_t {
  kIeee = 0,    // fp32 multiply-adds
  kTf32 = 1,    // operands rounded to 10 bits of fraction, sums in fp32
  kTf32x3 = 2,  // each operand as the sum of two tf32 numbers, three products: fp32's accuracy
};

struct MatmulPlan {
  Tensor out;  // allocated, not yet written
  ScalarType dtype;
  MatmulPrecision precision;
  MatmulParams params;  // complete where out has elements
};

MatmulPlan plan_matmul(const Tensor& a, const Tensor& b, int64_t precision);

}  // namespace opzoo
