// SPDX-License-Identifier: Apache-2.0
// The device-independent half of matmul: checks, result, parameters. Defined in matmul.cpp.
#pragma once

#include "common/dispatch.h"
#include "matmul/matmul.h"

namespace opzoo {

struct MatmulPlan {
  Tensor out;  // allocated, not yet written
  ScalarType dtype;
  MatmulParams params;  // complete where out has elements
};

MatmulPlan plan_matmul(const Tensor& a, const Tensor& b);

}  // namespace opzoo
