// SPDX-License-Identifier: Apache-2.0
// Schemas and checks: what ms_deform_attn does before a device is involved.
#include "ms_deform_attn/ms_deform_attn_plan.h"

namespace opzoo {
namespace {

void check_integers(const char* op, const char* name, const Tensor& t, const Tensor& value) {
  check_same_device(op, name, t, "value", value);
  OPZOO_CHECK(t.scalar_type() == ScalarType::Long,
              op,
              name,
              " must be int64, got ",
              dtype_name(t.scalar_type()));
}

void check_samples(const char* op, const char* name, const Tensor& t, const Tensor& value) {
  check_same_device(op, name, t, "value", value);
  const bool half =
      value.scalar_type() == ScalarType::Half || value.scalar_type() == ScalarType::BFloat16;
  const bool fits =
      t.scalar_type() == value.scalar_type() || (half && t.scalar_type() == ScalarType::Float);
  OPZOO_CHECK(fits,
              op,
              name,
              " must have the dtype of value, ",
              dtype_name(value.scalar_type()),
              half ? ", or float32" : "",
              ", got ",
              dtype_name(t.scalar_type()));
}

MsDeformAttnPlan make_plan(const char* op,
                           const Tensor& value,
                           const Tensor& shapes,
                           const Tensor& starts,
                           const Tensor& locations,
                           const Tensor& weights) {
  check_floating(op, "value", value);
  check_rank(op, "value", value, 4);
  check_integers(op, "spatial_shapes", shapes, value);
  check_integers(op, "level_start_index", starts, value);
  check_samples(op, "sampling_locations", locations, value);
  check_samples(op, "attention_weights", weights, value);
  check_same_dtype(op, "attention_weights", weights, "sampling_locations", locations);
  check_rank(op, "sampling_locations", locations, 6);
  MsDeformAttnPlan plan;
  MsDeformAttnParams& p = plan.params;
  p.B = value.size(0);
  p.S = value.size(1);
  p.M = value.size(2);
  p.D = value.size(3);
  p.Q = locations.size(1);
  p.L = locations.size(3);
  p.P = locations.size(4);
  OPZOO_CHECK(p.S > 0 || p.L == 0, op, "value must have the pixels of ", p.L, " levels, got none");
  check_shape(op, "spatial_shapes", shapes, {p.L, 2});
  check_shape(op, "level_start_index", starts, {p.L});
  check_shape(op, "sampling_locations", locations, {p.B, p.Q, p.M, p.L, p.P, 2});
  check_shape(op, "attention_weights", weights, {p.B, p.Q, p.M, p.L, p.P});
  if (value.is_cpu()) check_levels(op, shapes, starts, p.S);
  for (const Tensor* t : {&value, &shapes, &starts, &locations, &weights}) {
    plan.operands.push_back(opzoo::contiguous(*t));
  }
  p.value = plan.operands[0].const_data_ptr();
  p.shapes = data<int64_t>(plan.operands[1]);
  p.starts = data<int64_t>(plan.operands[2]);
  p.locations = plan.operands[3].const_data_ptr();
  p.weights = plan.operands[4].const_data_ptr();
  return plan;
}

}  // namespace

void check_levels(const char* op, const Tensor& shapes, const Tensor& starts, int64_t pixels) {
  const Tensor sizes = opzoo::contiguous(shapes), firsts = opzoo::contiguous(starts);
  MsDeformAttnParams p;
  p.shapes = data<int64_t>(sizes);
  p.starts = data<int64_t>(firsts);
  p.S = pixels;
  for (int64_t l = 0; l < sizes.size(0); ++l) {
    OPZOO_CHECK_VALUE(attn_level(p, l).height > 0,
                      op,
                      "level ",
                      l,
                      " of spatial_shapes must be positive and lie inside the ",
                      pixels,
                      " pixels of value, got ",
                      p.shapes[2 * l],
                      " x ",
                      p.shapes[2 * l + 1],
                      " from pixel ",
                      p.starts[l]);
  }
}

MsDeformAttnPlan plan_ms_deform_attn(const Tensor& value,
                                     const Tensor& shapes,
                                     const Tensor& starts,
                                     const Tensor& locations,
                                     const Tensor& weights) {
  MsDeformAttnPlan plan = make_plan("ms_deform_attn", value, shapes, starts, locations, weights);
  MsDeformAttnParams& p = plan.params;
  plan.out = empty({p.B, p.Q, p.M * p.D}, value.scalar_type(), value);
  p.out = plan.out.mutable_data_ptr();
  return plan;
}

MsDeformAttnPlan plan_ms_deform_attn_backward(const Tensor& grad,
                                              const Tensor& value,
                                              const Tensor& shapes,
                                              const Tensor& starts,
                                              const Tensor& locations,
                                              const Tensor& weights,
                                              bool need_value) {
  constexpr const char* kOp = "_ms_deform_attn_backward";
  MsDeformAttnPlan plan = make_plan(kOp, value, shapes, starts, locations, weights);
  MsDeformAttnParams& p = plan.params;
  check_same_device(kOp, "grad", grad, "value", value);
  check_same_dtype(kOp, "grad", grad, "value", value);
  check_shape(kOp, "grad", grad, {p.B, p.Q, p.M * p.D});
  plan.operands.push_back(opzoo::contiguous(grad));
  p.grad = plan.operands.back().const_data_ptr();
  const bool fp64 = value.scalar_type() == ScalarType::Double;
  const Sizes sizes = need_value ? sizes_of(value) : Sizes{0};
  plan.grad_value = zeros(sizes, fp64 ? ScalarType::Double : ScalarType::Float, value);
  p.grad_value = need_value ? plan.grad_value.mutable_data_ptr() : nullptr;
  plan.grad_locations = empty(sizes_of(locations), locations.scalar_type(), value);
  plan.grad_weights = empty(sizes_of(weights), weights.scalar_type(), value);
  p.grad_locations = plan.grad_locations.mutable_data_ptr();
  p.grad_weights = plan.grad_weights.mutable_data_ptr();
  return plan;
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def(
      "ms_deform_attn(Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor "
      "sampling_locations, Tensor attention_weights) -> Tensor");
  m.def(
      "_ms_deform_attn_backward(Tensor grad, Tensor value, Tensor spatial_shapes, Tensor "
      "level_start_index, Tensor sampling_locations, Tensor attention_weights, bool need_value) -> "
      "(Tensor, Tensor, Tensor)");
}
