// SPDX-License-Identifier: Apache-2.0
// Schema, checks and the layout of the batch: what matmul does before a device is involved.
#include "matmul/matmul_plan.h"

namespace opzoo {
namespace {

void check_matmul(const Tensor& a, const Tensor& b) {
  check_same_device("matmul", "b", b, "a", a);
  check_floating("matmul", "a", a);
  check_same_dtype("matmul", "b", b, "a", a);
  OPZOO_CHECK(
      a.dim() >= 2, "matmul", "a must have shape [*, M, K] with at least 2 axes, got ", shape(a));
  OPZOO_CHECK(a.dim() == b.dim(),
              "matmul",
              "b must have as many axes as a, ",
              a.dim(),
              ", got ",
              b.dim(),
              " (a has shape ",
              shape(a),
              ", b ",
              shape(b),
              ")");
  Sizes expected = sizes_of(a);
  expected[a.dim() - 2] = a.size(a.dim() - 1);
  expected[a.dim() - 1] = b.size(b.dim() - 1);
  OPZOO_CHECK(sizes_of(b) == expected,
              "matmul",
              "b must have shape ",
              to_string(expected),
              " to follow a of shape ",
              shape(a),
              ", got ",
              shape(b));
}

// Expanded operands can ask for a result no memory holds; the products below must not overflow.
void check_numel(const Sizes& sizes) {
  int64_t numel = 1;
  bool fits = true;
  for (const int64_t size : sizes) {
    if (size > 0) fits = fits && !__builtin_mul_overflow(numel, size, &numel);
  }
  OPZOO_CHECK(fits, "matmul", "the result would have shape ", to_string(sizes), ", too large");
}

// [B, M, K] with one matrix b for the whole batch is a single [B * M, K] product when the rows of
// a continue from one item to the next: large tiles instead of B thin ones.
void fold_batch_into_rows(MatmulParams& p) {
  StridedLoop<3>& loop = p.batches;
  if (loop.stride[kMatmulB][0] != 0 || loop.size[0] == 1) return;
  if (p.M == 1) {
    p.a_row = loop.stride[kMatmulA][0];
  } else if (loop.stride[kMatmulA][0] != p.M * p.a_row) {
    return;
  }
  p.M *= loop.size[0];
  loop.numel /= loop.size[0];
  if (loop.axes == 1) {
    loop.size[0] = 1;
    return;
  }
  --loop.axes;
  for (int axis = 0; axis < loop.axes; ++axis) {
    loop.size[axis] = loop.size[axis + 1];
    for (auto& stride : loop.stride) stride[axis] = stride[axis + 1];
  }
}

}  // namespace

MatmulPlan plan_matmul(const Tensor& a, const Tensor& b, int64_t precision) {
  check_matmul(a, b);
  OPZOO_CHECK_VALUE(precision >= 0 && precision <= 2,
                    "matmul",
                    "precision must be 0 (ieee), 1 (tf32) or 2 (tf32x3), got ",
                    precision);
  const auto rank = static_cast<int>(a.dim());
  Sizes sizes = sizes_of(a);
  sizes[rank - 1] = b.size(rank - 1);
  check_numel(sizes);

  MatmulPlan plan;
  plan.dtype = a.scalar_type();
  plan.precision = static_cast<MatmulPrecision>(precision);
  plan.out = empty(sizes, plan.dtype, a);
  MatmulParams& p = plan.params;
  p.M = sizes[rank - 2];
  p.N = sizes[rank - 1];
  p.K = a.size(rank - 1);
  if (plan.out.numel() == 0) return plan;

  p.a = a.const_data_ptr();
  p.b = b.const_data_ptr();
  p.out = plan.out.mutable_data_ptr();
  const Sizes a_strides = strides_of(a);
  const Sizes b_strides = strides_of(b);
  p.a_row = a_strides[rank - 2];
  p.a_col = a_strides[rank - 1];
  p.b_row = b_strides[rank - 2];
  p.b_col = b_strides[rank - 1];
  const Sizes out_strides = contiguous_strides(sizes);
  OPZOO_CHECK(make_strided_loop<3>(rank - 2,
                                   sizes.data(),
                                   {out_strides.data(), a_strides.data(), b_strides.data()},
                                   p.batches),
              "matmul",
              "at most ",
              kMaxLoopAxes,
              " batch axes that do not merge, got shapes ",
              shape(a),
              " and ",
              shape(b));
  fold_batch_into_rows(p);
  return plan;
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def("matmul(Tensor a, Tensor b, int precision=0) -> Tensor");
}
