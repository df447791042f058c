// SPDX-License-Identifier: Apache-2.0
// Schema, promotion, broadcasting: what add does before a device is involved.
#include <cmath>

#include "add/add_plan.h"

namespace opzoo {
namespace {

// Floating beats integral beats bool; within a category the wider type, and int64-ward or fp32
// where neither holds the other (uint8 with a signed type, float16 with bfloat16).
ScalarType promote(ScalarType a, ScalarType b) {
  if (a == b) return a;
  if (a == ScalarType::Bool) return b;
  if (b == ScalarType::Bool) return a;
  if (is_floating(a) != is_floating(b)) return is_floating(a) ? a : b;
  const auto rank = [](ScalarType t) {
    switch (t) {
      case ScalarType::Byte:
      case ScalarType::Char:
        return 1;
      case ScalarType::Short:
        return 2;
      case ScalarType::Int:
        return 3;
      case ScalarType::Long:
        return 4;
      case ScalarType::Half:
      case ScalarType::BFloat16:
        return 5;
      case ScalarType::Float:
        return 6;
      default:
        return 7;
    }
  };
  if (rank(a) == rank(b)) return is_floating(a) ? ScalarType::Float : ScalarType::Short;
  return rank(a) > rank(b) ? a : b;
}

int category(ScalarType t) {
  return t == ScalarType::Bool ? 0 : is_floating(t) ? 2 : 1;
}

// torch.result_type: a 0-d tensor only counts where its category is higher.
ScalarType result_type(const Tensor& a, const Tensor& b) {
  const ScalarType ta = a.scalar_type();
  const ScalarType tb = b.scalar_type();
  const bool number_a = a.dim() == 0 && b.dim() > 0;
  const bool number_b = b.dim() == 0 && a.dim() > 0;
  if (number_a && category(ta) <= category(tb)) return tb;
  if (number_b && category(tb) <= category(ta)) return ta;
  return promote(ta, tb);
}

Sizes broadcast_shape(const Tensor& a, const Tensor& b) {
  const Sizes sa = sizes_of(a);
  const Sizes sb = sizes_of(b);
  Sizes result(std::max(sa.size(), sb.size()));
  for (size_t back = 1; back <= result.size(); ++back) {
    const int64_t left = back <= sa.size() ? sa[sa.size() - back] : 1;
    const int64_t right = back <= sb.size() ? sb[sb.size() - back] : 1;
    OPZOO_CHECK(left == right || left == 1 || right == 1,
                "add",
                "a and b must broadcast, got shapes ",
                shape(a),
                " and ",
                shape(b));
    result[result.size() - back] = left == 1 ? right : left;
  }
  return result;
}

// Dense: every element of the storage range belongs to exactly one index.
bool is_dense(const Tensor& t) {
  StridedLoop<1> loop;
  const Sizes sizes = sizes_of(t);
  const Sizes strides = strides_of(t);
  return make_strided_loop<1>(
             static_cast<int>(sizes.size()), sizes.data(), {strides.data()}, loop) &&
         loop.is_contiguous();
}

Sizes output_strides(const Sizes& sizes, const Tensor& a, const Tensor& b) {
  for (const Tensor* t : {&a, &b}) {
    if (sizes_of(*t) == sizes && !t->is_contiguous() && is_dense(*t)) return strides_of(*t);
    if (sizes_of(*t) == sizes && t->is_contiguous()) break;
  }
  return contiguous_strides(sizes);
}

Sizes broadcast_strides(const Tensor& t, const Sizes& sizes) {
  Sizes result(sizes.size(), 0);
  const size_t missing = sizes.size() - t.dim();
  for (size_t axis = missing; axis < sizes.size(); ++axis) {
    const auto own = static_cast<int64_t>(axis - missing);
    if (t.size(own) != 1) result[axis] = t.stride(own);
  }
  return result;
}

bool is_number(const Tensor& t) {
  return t.dim() == 0 && t.is_cpu();
}

AddInput read_number(const Tensor& t) {
  AddInput number;
  dispatch_all(t.scalar_type(), "add", [&]<class T>() {
    const auto value = static_cast<acc_t<T>>(*data<T>(t));
    number.value_float = static_cast<double>(value);
    if constexpr (std::is_integral_v<T>) number.value_int = value;
  });
  return number;
}

}  // namespace

AddPlan plan_add(const Tensor& a, const Tensor& b, double alpha) {
  check_defined("add", "a", a);
  check_defined("add", "b", b);
  const bool number_a = is_number(a) && !is_number(b);
  const bool number_b = is_number(b);
  const Tensor& reference = number_a ? b : a;
  if (!number_a && !number_b) check_same_device("add", "b", b, "a", a);
  for (const auto& [name, t] : {std::pair{"a", &a}, std::pair{"b", &b}}) {
    const ScalarType dtype = t->scalar_type();
    OPZOO_CHECK(is_floating(dtype) || is_integer(dtype) || dtype == ScalarType::Bool,
                "add",
                name,
                " must have a floating, int8 to int64, uint8 or bool dtype, got ",
                dtype_name(dtype));
  }

  AddPlan plan;
  plan.dtype = result_type(a, b);
  const bool whole = std::trunc(alpha) == alpha && std::abs(alpha) < 0x1p63;
  OPZOO_CHECK_VALUE(is_floating(plan.dtype) || whole,
                    "add",
                    "alpha must be an integer for a result of dtype ",
                    dtype_name(plan.dtype),
                    ", got ",
                    alpha);
  const Sizes sizes = broadcast_shape(a, b);
  plan.out = empty_strided(sizes, output_strides(sizes, a, b), plan.dtype, reference);
  plan.params.alpha = alpha;
  plan.params.out = plan.out.mutable_data_ptr();

  const auto bind = [&](const Tensor& t, bool number, Tensor& kept, AddInput& input) {
    if (number) {
      input = read_number(t);
      return Sizes(sizes.size(), 0);
    }
    kept = to_dtype(t, plan.dtype);
    input.data = kept.const_data_ptr();
    return broadcast_strides(kept, sizes);
  };
  const Sizes out_strides = strides_of(plan.out);
  const Sizes a_strides = bind(a, number_a, plan.a, plan.params.a);
  const Sizes b_strides = bind(b, number_b, plan.b, plan.params.b);
  OPZOO_CHECK(make_strided_loop<3>(static_cast<int>(sizes.size()),
                                   sizes.data(),
                                   {out_strides.data(), a_strides.data(), b_strides.data()},
                                   plan.params.loop),
              "add",
              "at most ",
              kMaxLoopAxes,
              " axes that do not merge, got shapes ",
              shape(a),
              " and ",
              shape(b));
  return plan;
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def("add(Tensor a, Tensor b, float alpha) -> Tensor");
}
