// SPDX-License-Identifier: Apache-2.0
// Schemas and checks of nms, batched_nms, nms_padded and _nms_leaders.
#include <cmath>

#include "nms/nms_plan.h"

namespace opzoo {
namespace {

// Results of nms_padded are as long as max_output says. Beyond this it is taken for a mistake.
constexpr int64_t kMaxPaddedOutput = INT32_MAX;

void check_number_dtype(const char* op, const char* name, const Tensor& t) {
  const ScalarType dtype = t.scalar_type();
  OPZOO_CHECK(is_floating(dtype) || is_integer(dtype),
              op,
              name,
              " must have a float or integer dtype, got ",
              dtype_name(dtype));
}

// [N] beside boxes [N, 4]; [..., N] beside [..., N, 4].
void check_one_per_box(const char* op, const char* name, const Tensor& t, const Tensor& boxes) {
  check_rank(op, name, t, boxes.dim() - 1);
  Sizes expected = sizes_of(boxes);
  expected.pop_back();
  if (expected.size() == 1) {
    OPZOO_CHECK(t.size(0) == expected[0],
                op,
                name,
                " must have one element per box, ",
                expected[0],
                ", got ",
                t.size(0));
  } else {
    check_shape(op, name, t, expected);
  }
  check_same_device(op, name, t, "boxes", boxes);
}

template <class T>
ScoreLimit limit_as(double threshold) {
  if constexpr (std::is_integral_v<T>) {
    constexpr double kEnd = 0x1p63;  // beyond every int64
    if (threshold < -kEnd) return {};
    return {true, threshold >= kEnd ? INT64_MAX : static_cast<int64_t>(std::floor(threshold))};
  } else if constexpr (sizeof(T) == 2) {
    return {true, score_key(T(static_cast<float>(threshold)))};
  } else {
    return {true, score_key(static_cast<T>(threshold))};
  }
}

// Axes before the last `own` ones count as one; a tensor whose axes have no common stride is
// copied.
int64_t flatten_images(Tensor& t, int64_t own) {
  const int64_t leading = t.dim() - own;
  if (leading == 0) return 0;
  if (leading == 1) return t.stride(0);
  t = opzoo::contiguous(t);
  // Not a stride of t: torch calls a tensor contiguous whatever the strides of its axes of size 1.
  int64_t step = 1;
  for (int64_t axis = leading; axis < t.dim(); ++axis) step *= t.size(axis);
  return step;
}

NmsPlan plan(const char* op,
             const Tensor& boxes,
             const Tensor& scores,
             const OptionalTensor& idxs,
             double iou_threshold,
             std::optional<double> score_threshold,
             std::optional<int64_t> max_output) {
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
  OPZOO_CHECK_VALUE(!score_threshold || *score_threshold == *score_threshold,
                    op,
                    "score_threshold must be a number, got nan");
  OPZOO_CHECK_VALUE(!max_output || *max_output >= 0,
                    op,
                    "max_output must be at least 0, got ",
                    max_output.value_or(0));

  NmsPlan plan{op,
               1,
               boxes.size(boxes.dim() - 2),
               max_output.value_or(INT64_MAX),
               iou_threshold,
               {},
               boxes,
               scores,
               std::nullopt,
               {},
               {},
               {},
               sizes_of(boxes)};
  plan.batch_sizes.resize(plan.batch_sizes.size() - 2);
  for (const int64_t size : plan.batch_sizes) plan.images *= size;
  if (score_threshold) {
    dispatch_all(scores.scalar_type(), op, [&]<class T>() {
      plan.score_limit = limit_as<T>(*score_threshold);
    });
  }

  const int64_t box_images = flatten_images(plan.boxes, 2);
  const int64_t rank = boxes.dim();
  plan.boxes_view = {plan.boxes.const_data_ptr(),
                     box_images,
                     plan.boxes.stride(rank - 2),
                     plan.boxes.stride(rank - 1)};
  const int64_t score_images = flatten_images(plan.scores, 1);
  plan.scores_view = {plan.scores.const_data_ptr(), score_images, plan.scores.stride(rank - 2)};
  if (idxs) {
    Tensor classes = to_dtype(*idxs, ScalarType::Long);
    const int64_t class_images = flatten_images(classes, 1);
    plan.classes_view = {classes.const_data_ptr(), class_images, classes.stride(rank - 2)};
    plan.classes = classes;
  }
  return plan;
}

}  // namespace

NmsPlan plan_nms(const char* op,
                 const Tensor& boxes,
                 const Tensor& scores,
                 const OptionalTensor& idxs,
                 double iou_threshold,
                 std::optional<double> score_threshold,
                 std::optional<int64_t> max_output) {
  check_rank(op, "boxes", boxes, 2);
  OPZOO_CHECK(boxes.size(1) == 4, op, "boxes must have shape [N, 4], got ", shape(boxes));
  return plan(op, boxes, scores, idxs, iou_threshold, score_threshold, max_output);
}

NmsPlan plan_nms_padded(const Tensor& boxes,
                        const Tensor& scores,
                        double iou_threshold,
                        int64_t max_output,
                        const OptionalTensor& idxs,
                        std::optional<double> score_threshold) {
  const char* op = "nms_padded";
  OPZOO_CHECK(boxes.dim() >= 2 && boxes.size(boxes.dim() - 1) == 4,
              op,
              "boxes must have shape [..., N, 4], got ",
              shape(boxes));
  OPZOO_CHECK_VALUE(max_output <= kMaxPaddedOutput,
                    op,
                    "max_output must be at most ",
                    kMaxPaddedOutput,
                    ", got ",
                    max_output);
  return plan(op, boxes, scores, idxs, iou_threshold, score_threshold, max_output);
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def(
      "nms(Tensor boxes, Tensor scores, float iou_threshold, *, float? score_threshold=None, "
      "int? max_output=None) -> Tensor");
  m.def(
      "batched_nms(Tensor boxes, Tensor scores, Tensor idxs, float iou_threshold, *, "
      "float? score_threshold=None, int? max_output=None) -> Tensor");
  m.def(
      "nms_padded(Tensor boxes, Tensor scores, float iou_threshold, SymInt max_output, "
      "Tensor? idxs=None, *, float? score_threshold=None) -> (Tensor indices, Tensor count)");
  m.def("_nms_leaders(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor");
}
