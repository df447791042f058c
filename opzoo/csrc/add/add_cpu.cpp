// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "add/add_plan.h"

namespace opzoo {
namespace {

constexpr int64_t kGrain = 32768;

// Items [begin, end): whole runs along the innermost axis, so that the compiler sees a plain loop.
template <class T>
void add_range(const AddParams& p, int64_t begin, int64_t end) {
  const auto& loop = p.loop;
  const auto* a = static_cast<const T*>(p.a.data);
  const auto* b = static_cast<const T*>(p.b.data);
  auto* out = static_cast<T*>(p.out);
  const auto alpha = static_cast<acc_t<T>>(p.alpha);
  const auto number_a = add_number<T>(p.a);
  const auto number_b = add_number<T>(p.b);
  const int64_t step_out = loop.stride[kAddOut][0];
  const int64_t step_a = loop.stride[kAddA][0];
  const int64_t step_b = loop.stride[kAddB][0];

  const auto run = [&](auto load_a, auto load_b, int64_t length, T* target) {
    for (int64_t i = 0; i < length; ++i) {
      target[i * step_out] = add_value<T>(load_a(i), load_b(i), alpha);
    }
  };
  for (int64_t item = begin; item < end;) {
    int64_t offset[3];
    offsets_of(loop, item, offset);
    const int64_t length = std::min(end - item, loop.size[0] - item % loop.size[0]);
    T* target = out + offset[kAddOut];
    const auto from_a = [&](int64_t i) {
      return static_cast<acc_t<T>>(a[offset[kAddA] + i * step_a]);
    };
    const auto from_b = [&](int64_t i) {
      return static_cast<acc_t<T>>(b[offset[kAddB] + i * step_b]);
    };
    const auto as_a = [&](int64_t) { return number_a; };
    const auto as_b = [&](int64_t) { return number_b; };
    if (a && b && loop.is_contiguous()) {
      const T* row_a = a + offset[kAddA];
      const T* row_b = b + offset[kAddB];
      for (int64_t i = 0; i < length; ++i) {
        target[i] =
            add_value<T>(static_cast<acc_t<T>>(row_a[i]), static_cast<acc_t<T>>(row_b[i]), alpha);
      }
    } else if (a && b) {
      run(from_a, from_b, length, target);
    } else if (a) {
      run(from_a, as_b, length, target);
    } else {
      run(as_a, from_b, length, target);
    }
    item += length;
  }
}

Tensor add_cpu(const Tensor& a, const Tensor& b, double alpha) {
  AddPlan plan = plan_add(a, b, alpha);
  if (plan.params.loop.numel == 0) return plan.out;
  dispatch_all(plan.dtype, "add", [&]<class T>() {
    parallel_for(0, plan.params.loop.numel, kGrain, [&](int64_t begin, int64_t end) {
      add_range<T>(plan.params, begin, end);
    });
  });
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("add", OPZOO_BOX(opzoo::add_cpu));
}
