// SPDX-License-Identifier: Apache-2.0
// Schemas and checks of soft_nms and batched_soft_nms.
#include "soft_nms/soft_nms_plan.h"

namespace opzoo {
namespace {

void check_number_dtype(const char* op, const char* name, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  OPZOO_CHECK(is_floating(dtype) || is_integer(dtype),
              op,
              name,
              " must have a float or integer dtype, got ",
              dtype_name(dtype));
}

void check_one_per_box(const char* op, const char* name, const Tensor& t, const Tensor& boxes) {
  check_rank(op, name, t, 1);
  OPZOO_CHECK(t.size(0) == boxes.size(0),
              op,
              name,
              " must have one element per box, ",
              boxes.size(0),
              ", got ",
              t.size(0));
  check_same_device(op, name, t, "boxes", boxes);
}

void check_numbers(const char* op, const SoftNmsNumbers& numbers) {  // each is false for NaN
  OPZOO_CHECK_VALUE(numbers.iou_threshold >= 0 && numbers.iou_threshold <= 1,
                    op,
                    "iou_threshold must be in [0, 1], got ",
                    numbers.iou_threshold);
  OPZOO_CHECK_VALUE(numbers.sigma > 0, op, "sigma must be greater than 0, got ", numbers.sigma);
  OPZOO_CHECK_VALUE(
      numbers.min_score >= 0, op, "min_score must not be negative, got ", numbers.min_score);
  OPZOO_CHECK_VALUE(numbers.method >= 0 && numbers.method <= 2,
                    op,
                    "method must be 0 (naive), 1 (linear) or 2 (gaussian), got ",
                    numbers.method);
}

bool needs_double(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Long || dtype == ScalarType::Int;
}

}  // namespace

SoftNmsPlan plan_soft_nms(const char* op,
                          const Tensor& boxes,
                          const Tensor& scores,
                          const OptionalTensor& idxs,
                          const SoftNmsNumbers& numbers) {
  check_rank(op, "boxes", boxes, 2);
  OPZOO_CHECK(boxes.size(1) == 4, op, "boxes must have shape [N, 4], got ", shape(boxes));
  OPZOO_CHECK(boxes.size(0) <= kSoftNmsMostBoxes,
              op,
              "boxes must be at most ",
              kSoftNmsMostBoxes,
              ", got ",
              boxes.size(0));
  check_number_dtype(op, "boxes", boxes);
  check_one_per_box(op, "scores", scores, boxes);
  check_number_dtype(op, "scores", scores);
  if (idxs) {
    check_one_per_box(op, "idxs", *idxs, boxes);
    OPZOO_CHECK(is_integer(idxs->scalar_type()),
                op,
                "idxs must have an integer dtype, got ",
                dtype_name(idxs->scalar_type()));
  }
  check_numbers(op, numbers);

  OptionalTensor classes;
  if (idxs) classes = to_dtype(*idxs, ScalarType::Long);
  const SoftNmsInput input{boxes.const_data_ptr(),
                           boxes.stride(0),
                           boxes.stride(1),
                           scores.const_data_ptr(),
                           scores.stride(0)};
  const ScalarType of_boxes = boxes.scalar_type(), of_scores = scores.scalar_type();
  const ScalarType arithmetic =
      needs_double(of_boxes) || needs_double(of_scores) ? ScalarType::Double : ScalarType::Float;
  const ScalarType widened = needs_double(of_scores) ? ScalarType::Double : ScalarType::Float;
  const ScalarType result = is_floating(of_scores) ? of_scores : widened;
  return {op, boxes.size(0), numbers, boxes, scores, classes, input, arithmetic, result};
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def(
      "soft_nms(Tensor boxes, Tensor scores, float iou_threshold, float sigma, float min_score, "
      "int method) -> (Tensor, Tensor)");
  m.def(
      "batched_soft_nms(Tensor boxes, Tensor scores, Tensor idxs, float iou_threshold, float "
      "sigma, "
      "float min_score, int method) -> (Tensor, Tensor)");
}
