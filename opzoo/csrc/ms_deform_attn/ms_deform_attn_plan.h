// SPDX-License-Identifier: Apache-2.0
// The device-independent half of ms_deform_attn: checks, results, parameters. Defined in
// ms_deform_attn.cpp.
#pragma once

#include "common/dispatch.h"
#include "ms_deform_attn/ms_deform_attn.h"

namespace opzoo {

struct MsDeformAttnPlan {
  MsDeformAttnParams params;
  Tensor out;             // forward: allocated, not yet written
  Tensor grad_value;      // backward: zeros in the type of the sums; empty if not wanted
  Tensor grad_locations;  // backward: allocated, not yet written
  Tensor grad_weights;
  std::vector<Tensor> operands;  // contiguous copies that params points into
};

MsDeformAttnPlan plan_ms_deform_attn(const Tensor& value,
                                     const Tensor& shapes,
                                     const Tensor& starts,
                                     const Tensor& locations,
                                     const Tensor& weights);
MsDeformAttnPlan plan_ms_deform_attn_backward(const Tensor& grad,
                                              const Tensor& value,
                                              const Tensor& shapes,
                                              const Tensor& starts,
                                              const Tensor& locations,
                                              const Tensor& weights,
                                              bool need_value);

// ValueError unless every level lies inside value's pixels; shapes and starts are on the CPU.
void check_levels(const char* op, const Tensor& shapes, const Tensor& starts, int64_t pixels);

// body<T, C>() with the type of value and that of locations and weights.
template <class Body>
void dispatch_attn(const char* op, ScalarType value, ScalarType locations, Body&& body) {
  dispatch_floating(value, op, [&]<class T>() {
    if constexpr (sizeof(T) == 2) {
      if (locations == ScalarType::Float) return body.template operator()<T, float>();
    }
    return body.template operator()<T, T>();
  });
}

}  // namespace opzoo
