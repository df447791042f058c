// SPDX-License-Identifier: Apache-2.0
// The device-independent half of soft_nms and batched_soft_nms: checks, views, types. Defined in
// soft_nms.cpp.
#pragma once

#include "common/dispatch.h"
#include "soft_nms/soft_nms.h"

namespace opzoo {

struct SoftNmsNumbers {
  double iou_threshold, sigma, min_score;
  int64_t method;  // a SoftNmsMethod
};

struct SoftNmsPlan {
  const char* op;
  int64_t n;
  SoftNmsNumbers numbers;
  Tensor boxes, scores;
  OptionalTensor classes;  // int64; none for soft_nms
  SoftNmsInput input;
  ScalarType arithmetic;  // float32 or float64
  ScalarType result;      // dtype of the scores returned

  template <class acc>
  SoftNmsRule<acc> rule() const {
    return {static_cast<acc>(numbers.iou_threshold),
            static_cast<acc>(numbers.min_score),
            numbers.sigma};
  }
};

SoftNmsPlan plan_soft_nms(const char* op,
                          const Tensor& boxes,
                          const Tensor& scores,
                          const OptionalTensor& idxs,
                          const SoftNmsNumbers& numbers);

// body.operator()<kMethod, acc>() for the plan's method and arithmetic.
template <class Body>
void dispatch_soft_nms(const SoftNmsPlan& plan, const Body& body) {
  const auto with_method = [&]<SoftNmsMethod kMethod>() {
    if (plan.arithmetic == ScalarType::Double) {
      body.template operator()<kMethod, double>();
    } else {
      body.template operator()<kMethod, float>();
    }
  };
  switch (static_cast<SoftNmsMethod>(plan.numbers.method)) {
    case SoftNmsMethod::kNaive:
      return with_method.template operator()<SoftNmsMethod::kNaive>();
    case SoftNmsMethod::kLinear:
      return with_method.template operator()<SoftNmsMethod::kLinear>();
    case SoftNmsMethod::kGaussian:
      return with_method.template operator()<SoftNmsMethod::kGaussian>();
  }
}

}  // namespace opzoo
