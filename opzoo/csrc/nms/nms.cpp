// SPDX-License-Identifier: Apache-2.0
// Schemas and checks of nms and batched_nms.
#include "nms/nms_plan.h"

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

}  // namespace

NmsPlan plan_nms(const char* op,
                 const Tensor& boxes,
                 const Tensor& scores,
                 const OptionalTensor& idxs,
                 double iou_threshold) {
  check_rank(op, "boxes", boxes, 2);
  OPZOO_CHECK(boxes.size(1) == 4, op, "boxes must have shape [N, 4], got ", shape(boxes));
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
  OPZOO_CHECK_VALUE(iou_threshold >= 0 && iou_threshold <= 1,  // false for NaN
                    op,
                    "iou_threshold must be in [0, 1], got ",
                    iou_threshold);

  OptionalTensor classes;
  if (idxs) classes = to_dtype(*idxs, ScalarType::Long);
  const BoxesView view{boxes.const_data_ptr(), boxes.stride(0), boxes.stride(1)};
  return {op, boxes.size(0), iou_threshold, boxes, scores, classes, view};
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def("nms(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor");
  m.def("batched_nms(Tensor boxes, Tensor scores, Tensor idxs, float iou_threshold) -> Tensor");
}
