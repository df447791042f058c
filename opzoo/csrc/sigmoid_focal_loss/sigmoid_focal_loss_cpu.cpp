// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "common/half_cpu.h"
#include "common/lanes_cpu.h"
#include "sigmoid_focal_loss/sigmoid_focal_loss_plan.h"

namespace opzoo {
namespace {

constexpr int64_t kGrain = 8192;
constexpr int64_t kPiece =
    512;  // elements at a time; four buffers of them stay in the first-level cache

// One piece in fp32; count is a multiple of kLaneStep, values beyond the piece are never read back.
struct FocalPiece {
  alignas(32) float inputs[kPiece];
  alignas(32) float targets[kPiece];
  alignas(32) float grad[kPiece];
  alignas(32) float out[kPiece];
  int64_t count = 0;
};

template <bool kBackward>
OPZOO_LANES_INLINE void compute_piece(FocalPiece& piece, float alpha, float gamma) {
  for (int64_t i = 0; i < piece.count; i += kLaneStep) {
    Lanes<float> x, t, spread{}, grad;
    load(piece.inputs + i, x);
    load(piece.targets + i, t);
    FocalFactors<Lanes<float>> f;
    focal_factors<Words>(x, t, spread + alpha, f);
    Lanes<float> power = f.q * f.q;
    if (gamma != 2) {
      for (int lane = 0; lane < kLaneStep; ++lane) power[lane] = std::pow(f.q[lane], gamma);
    }
    Lanes<float> value = f.alpha * power;
    if constexpr (kBackward) {
      load(piece.grad + i, grad);
      value = grad * (value * (gamma * f.inner + f.outer));
    } else {
      value = value * f.cross_entropy;
    }
    store(value, piece.out + i);
  }
}

OPZOO_LANES_KERNEL void focal_losses(FocalPiece& piece, float alpha, float gamma) {
  compute_piece<false>(piece, alpha, gamma);
}
OPZOO_LANES_KERNEL void focal_gradients(FocalPiece& piece, float alpha, float gamma) {
  compute_piece<true>(piece, alpha, gamma);
}

template <class T>
void widen_run(const T* from, int64_t count, float* to) {
  if constexpr (std::is_same_v<T, Half>) {
    widen(from, count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i];
  }
}

template <class T>
void gather_run(const T* from, int64_t stride, int64_t count, float* to) {
  if (stride == 1) {
    widen_run(from, count, to);
  } else {
    for (int64_t i = 0; i < count; ++i) to[i] = from[i * stride];
  }
}

// Elements [item, item + count), all along the innermost axis.
template <class T>
void load_run(
    const SigmoidFocalLossParams& p, int64_t item, int64_t count, float* x, float* t, float* grad) {
  int64_t offset[4];
  offsets_of(p.loop, item, offset);
  const auto stride = [&](FocalLossOperand operand) { return p.loop.stride[operand][0]; };
  gather_run(
      static_cast<const T*>(p.inputs) + offset[kFocalInputs], stride(kFocalInputs), count, x);
  if (p.grad) {
    gather_run(static_cast<const T*>(p.grad) + offset[kFocalGrad], stride(kFocalGrad), count, grad);
  }
  if (p.classes == 0) {
    gather_run(
        static_cast<const T*>(p.targets) + offset[kFocalTargets], stride(kFocalTargets), count, t);
    return;
  }
  if (p.loop.size[0] == p.classes && stride(kFocalTargets) == 0) {  // one id for the whole run
    const int64_t column =
        static_cast<const int64_t*>(p.targets)[offset[kFocalTargets]] - item % p.classes;
    std::fill_n(t, count, 0.0f);
    if (column >= 0 && column < count) t[column] = 1;
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    t[i] = focal_target<T>(p, item + i, offset[kFocalTargets] + i * stride(kFocalTargets));
  }
}

template <class T>
void compute_range(const SigmoidFocalLossParams& p, int64_t begin, int64_t end) {
  FocalPiece piece;
  for (int64_t item = begin; item < end; item += kPiece) {
    const int64_t count = std::min(kPiece, end - item);
    for (int64_t done = 0; done < count;) {
      const int64_t row = p.loop.size[0] - (item + done) % p.loop.size[0];
      const int64_t run = std::min(count - done, row);
      load_run<T>(
          p, item + done, run, piece.inputs + done, piece.targets + done, piece.grad + done);
      done += run;
    }
    piece.count = div_up(count, kLaneStep) * kLaneStep;
    for (int64_t i = count; i < piece.count; ++i)
      piece.inputs[i] = piece.targets[i] = piece.grad[i] = 0;
    (p.grad ? focal_gradients : focal_losses)(
        piece, static_cast<float>(p.alpha), static_cast<float>(p.gamma));
    T* out = static_cast<T*>(p.out) + item;
    if constexpr (std::is_same_v<T, Half>) {
      narrow(piece.out, count, out);
    } else {
      for (int64_t i = 0; i < count; ++i) out[i] = static_cast<T>(piece.out[i]);
    }
  }
}

template <>
void compute_range<double>(const SigmoidFocalLossParams& p, int64_t begin, int64_t end) {
  for (int64_t item = begin; item < end; ++item) {
    int64_t offset[4];
    offsets_of(p.loop, item, offset);
    const double x = static_cast<const double*>(p.inputs)[offset[kFocalInputs]];
    const double t = focal_target<double>(p, item, offset[kFocalTargets]);
    double& out = static_cast<double*>(p.out)[item];
    if (p.grad) {
      const double grad = static_cast<const double*>(p.grad)[offset[kFocalGrad]];
      out = focal_value<true>(x, t, grad, p.alpha, p.gamma);
    } else {
      out = focal_value<false>(x, t, 0.0, p.alpha, p.gamma);
    }
  }
}

Tensor run(const SigmoidFocalLossPlan& plan) {
  const SigmoidFocalLossParams& p = plan.params;
  if (p.loop.numel == 0) return plan.out;
  dispatch_floating(plan.out.scalar_type(), "sigmoid_focal_loss", [&]<class T>() {
    parallel_for(0, p.loop.numel, kGrain, [&](int64_t begin, int64_t end) {
      compute_range<T>(p, begin, end);
    });
  });
  return plan.out;
}

Tensor forward_cpu(const Tensor& inputs, const Tensor& targets, double alpha, double gamma) {
  return run(plan_sigmoid_focal_loss(inputs, targets, alpha, gamma));
}

Tensor backward_cpu(
    const Tensor& grad, const Tensor& inputs, const Tensor& targets, double alpha, double gamma) {
  return run(plan_sigmoid_focal_loss_backward(grad, inputs, targets, alpha, gamma));
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("sigmoid_focal_loss", OPZOO_BOX(opzoo::forward_cpu));
  m.impl("_sigmoid_focal_loss_backward", OPZOO_BOX(opzoo::backward_cpu));
}
