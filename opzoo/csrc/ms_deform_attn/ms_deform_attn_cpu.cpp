// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "common/lanes_cpu.h"
#include "ms_deform_attn/ms_deform_attn_plan.h"

namespace opzoo {

// The four pixels of a sample, D channels each.
template <class T>
struct AttnRows {
  const T* pixel[4];
};

namespace {

template <class T>
OPZOO_LANES_INLINE void add_pixels(const AttnRows<T>& rows,
                                   const acc_t<T>* weight,
                                   int64_t D,
                                   acc_t<T>* sum) {
  int64_t d = 0;
  for (; d + kLaneStep <= D; d += kLaneStep) {
    Lanes<acc_t<T>> total, value;
    load(sum + d, total);
    for (int corner = 0; corner < 4; ++corner) {
      load(rows.pixel[corner] + d, value);
      total += weight[corner] * value;
    }
    store(total, sum + d);
  }
  for (; d < D; ++d) {
    for (int corner = 0; corner < 4; ++corner)
      sum[d] += weight[corner] * static_cast<acc_t<T>>(rows.pixel[corner][d]);
  }
}

template <class T>
OPZOO_LANES_INLINE void dot_pixels(const AttnRows<T>& rows,
                                   const acc_t<T>* grad,
                                   int64_t D,
                                   acc_t<T>* dot) {
  int64_t d = 0;
  Lanes<acc_t<T>> sums[4] = {};
  for (; d + kLaneStep <= D; d += kLaneStep) {
    Lanes<acc_t<T>> along, value;
    load(grad + d, along);
    for (int corner = 0; corner < 4; ++corner) {
      load(rows.pixel[corner] + d, value);
      sums[corner] += along * value;
    }
  }
  for (int corner = 0; corner < 4; ++corner) {
    dot[corner] = 0;
    for (int lane = 0; lane < kLaneStep; ++lane) dot[corner] += sums[corner][lane];
    for (int64_t rest = d; rest < D; ++rest)
      dot[corner] += grad[rest] * static_cast<acc_t<T>>(rows.pixel[corner][rest]);
  }
}

template <class acc>
OPZOO_LANES_INLINE void spread_gradient(const acc* grad,
                                        const acc* weight,
                                        int64_t D,
                                        acc* const* target) {
  for (int corner = 0; corner < 4; ++corner) {
    if (weight[corner] == 0) continue;
    acc* to = target[corner];
    int64_t d = 0;
    for (; d + kLaneStep <= D; d += kLaneStep) {
      Lanes<acc> sum, along;
      load(to + d, sum);
      load(grad + d, along);
      sum += weight[corner] * along;
      store(sum, to + d);
    }
    for (; d < D; ++d) to[d] += weight[corner] * grad[d];
  }
}

}  // namespace

// sum[d] += weight[corner] * pixel[corner][d]; dot[corner] = grad . pixel[corner];
// target[corner][d] += weight[corner] * grad[d]. Each exists for the widest vectors of the machine.
template <class T>
void add_rows(const AttnRows<T>& rows, const acc_t<T>* weight, int64_t D, acc_t<T>* sum);
template <class T>
void dot_rows(const AttnRows<T>& rows, const acc_t<T>* grad, int64_t D, acc_t<T>* dot);
template <class acc>
void spread_row(const acc* grad, const acc* weight, int64_t D, acc* const* target);

#define OPZOO_DEFINE(T)                                                            \
  template <>                                                                      \
  OPZOO_LANES_KERNEL void add_rows<T>(                                             \
      const AttnRows<T>& rows, const acc_t<T>* weight, int64_t D, acc_t<T>* sum) { \
    add_pixels<T>(rows, weight, D, sum);                                           \
  }                                                                                \
  template <>                                                                      \
  OPZOO_LANES_KERNEL void dot_rows<T>(                                             \
      const AttnRows<T>& rows, const acc_t<T>* grad, int64_t D, acc_t<T>* dot) {   \
    dot_pixels<T>(rows, grad, D, dot);                                             \
  }
OPZOO_DEFINE(double)
OPZOO_DEFINE(float)
OPZOO_DEFINE(Half)
OPZOO_DEFINE(BFloat16)
#define OPZOO_DEFINE_SPREAD(acc)                                           \
  template <>                                                              \
  OPZOO_LANES_KERNEL void spread_row<acc>(                                 \
      const acc* grad, const acc* weight, int64_t D, acc* const* target) { \
    spread_gradient<acc>(grad, weight, D, target);                         \
  }
OPZOO_DEFINE_SPREAD(double)
OPZOO_DEFINE_SPREAD(float)

namespace {

// The samples of one query and head.
template <class C>
struct AttnQuery {
  const C* locations;
  const C* weights;
  int64_t first_sample;  // number of the first among all
};

template <class C>
AttnQuery<C> query_of(const MsDeformAttnParams& p, int64_t b, int64_t q, int64_t m) {
  const int64_t first = ((b * p.Q + q) * p.M + m) * p.samples();
  return {static_cast<const C*>(p.locations) + 2 * first,
          static_cast<const C*>(p.weights) + first,
          first};
}

template <class T>
AttnRows<T> rows_of(const MsDeformAttnParams& p,
                    const AttnSample<acc_t<T>>& sample,
                    int64_t b,
                    int64_t m) {
  AttnRows<T> rows;
  for (int corner = 0; corner < 4; ++corner) {
    rows.pixel[corner] =
        static_cast<const T*>(p.value) + ((b * p.S + sample.pixel[corner]) * p.M + m) * p.D;
  }
  return rows;
}

// Each query of the range for all heads: a thread writes rows of its own.
template <class T, class C>
void attend(const MsDeformAttnParams& p, int64_t begin, int64_t end) {
  using acc = acc_t<T>;
  std::vector<acc> sum(static_cast<size_t>(p.D));
  for (int64_t item = begin; item < end; ++item) {
    const int64_t b = item / (p.Q * p.M), m = item % p.M, q = item / p.M % p.Q;
    const AttnQuery<C> query = query_of<C>(p, b, q, m);
    std::fill(sum.begin(), sum.end(), acc(0));
    for (int64_t l = 0; l < p.L; ++l) {
      const AttnLevel level = attn_level(p, l);
      for (int64_t k = l * p.P; k < (l + 1) * p.P; ++k) {
        auto sample = attn_sample<acc>(level, query.locations[2 * k], query.locations[2 * k + 1]);
        if (!sample.inside) continue;
        for (acc& weight : sample.weight) weight *= static_cast<acc>(query.weights[k]);
        add_rows<T>(rows_of<T>(p, sample, b, m), sample.weight, p.D, sum.data());
      }
    }
    T* out = static_cast<T*>(p.out) + item * p.D;
    for (int64_t d = 0; d < p.D; ++d) out[d] = static_cast<T>(sum[d]);
  }
}

// Each (item, head) of the range with all its queries in order: a thread adds to rows of grad_value
// that no other touches, in an order that does not depend on the threads.
template <class T, class C>
void attend_backward(const MsDeformAttnParams& p, int64_t begin, int64_t end) {
  using acc = acc_t<T>;
  std::vector<acc> grad(static_cast<size_t>(p.D));
  for (int64_t item = begin; item < end; ++item) {
    const int64_t b = item / p.M, m = item % p.M;
    for (int64_t q = 0; q < p.Q; ++q) {
      const T* from = static_cast<const T*>(p.grad) + ((b * p.Q + q) * p.M + m) * p.D;
      for (int64_t d = 0; d < p.D; ++d) grad[d] = static_cast<acc>(from[d]);
      const AttnQuery<C> query = query_of<C>(p, b, q, m);
      C* grad_locations = static_cast<C*>(p.grad_locations) + 2 * query.first_sample;
      C* grad_weights = static_cast<C*>(p.grad_weights) + query.first_sample;
      for (int64_t l = 0; l < p.L; ++l) {
        const AttnLevel level = attn_level(p, l);
        for (int64_t k = l * p.P; k < (l + 1) * p.P; ++k) {
          auto sample = attn_sample<acc>(level, query.locations[2 * k], query.locations[2 * k + 1]);
          const acc attention = static_cast<acc>(query.weights[k]);
          acc along[3] = {};  // the derivative to the weight, and per pixel along x and y
          if (sample.inside) {
            acc dot[4];
            dot_rows<T>(rows_of<T>(p, sample, b, m), grad.data(), p.D, dot);
            for (int corner = 0; corner < 4; ++corner) {
              along[0] += sample.weight[corner] * dot[corner];
              along[1] += sample.slope_x[corner] * dot[corner];
              along[2] += sample.slope_y[corner] * dot[corner];
              sample.weight[corner] *= attention;
            }
            if (p.grad_value) {
              acc* target[4];
              for (int corner = 0; corner < 4; ++corner) {
                target[corner] = static_cast<acc*>(p.grad_value) +
                                 ((b * p.S + sample.pixel[corner]) * p.M + m) * p.D;
              }
              spread_row<acc>(grad.data(), sample.weight, p.D, target);
            }
          }
          grad_weights[k] = static_cast<C>(along[0]);
          grad_locations[2 * k] =
              static_cast<C>(attention * along[1] * static_cast<acc>(level.width));
          grad_locations[2 * k + 1] =
              static_cast<C>(attention * along[2] * static_cast<acc>(level.height));
        }
      }
    }
  }
}

Tensor forward_cpu(const Tensor& value,
                   const Tensor& shapes,
                   const Tensor& starts,
                   const Tensor& locations,
                   const Tensor& weights) {
  const MsDeformAttnPlan plan = plan_ms_deform_attn(value, shapes, starts, locations, weights);
  const MsDeformAttnParams& p = plan.params;
  if (p.B * p.Q * p.M * p.D == 0) return plan.out;
  const int64_t grain = std::max<int64_t>(1, 8192 / (p.samples() * p.D + 1));
  dispatch_attn(
      "ms_deform_attn", value.scalar_type(), locations.scalar_type(), [&]<class T, class C>() {
        parallel_for(0, p.B * p.Q * p.M, grain, [&](int64_t begin, int64_t end) {
          attend<T, C>(p, begin, end);
        });
      });
  return plan.out;
}

std::tuple<Tensor, Tensor, Tensor> backward_cpu(const Tensor& grad,
                                                const Tensor& value,
                                                const Tensor& shapes,
                                                const Tensor& starts,
                                                const Tensor& locations,
                                                const Tensor& weights,
                                                bool need_value) {
  const MsDeformAttnPlan plan =
      plan_ms_deform_attn_backward(grad, value, shapes, starts, locations, weights, need_value);
  const MsDeformAttnParams& p = plan.params;
  if (p.B * p.Q * p.M > 0) {
    dispatch_attn(
        "ms_deform_attn", value.scalar_type(), locations.scalar_type(), [&]<class T, class C>() {
          parallel_for(0, p.B * p.M, 1, [&](int64_t begin, int64_t end) {
            attend_backward<T, C>(p, begin, end);
          });
        });
  }
  return {to_dtype(plan.grad_value, value.scalar_type()), plan.grad_locations, plan.grad_weights};
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("ms_deform_attn", OPZOO_BOX(opzoo::forward_cpu));
  m.impl("_ms_deform_attn_backward", OPZOO_BOX(opzoo::backward_cpu));
}
