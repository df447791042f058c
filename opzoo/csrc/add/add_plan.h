// SPDX-License-Identifier: Apache-2.0
// The device-independent half of add: checks, result, parameters. Defined in add.cpp.
#pragma once

#include "add/add.h"
#include "common/dispatch.h"

namespace opzoo {

struct AddPlan {
  Tensor out;   // allocated, not yet written
  Tensor a, b;  // keep converted operands alive
  ScalarType dtype;
  AddParams params;
};

AddPlan plan_add(const Tensor& a, const Tensor& b, double alpha);

}  // namespace opzoo
