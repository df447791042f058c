// SPDX-License-Identifier: Apache-2.0
// sigmoid_focal_loss(inputs, targets, alpha, gamma), element by element, with p = sigmoid(x):
//
//   loss = alpha_t * q^gamma * ce          q  = p (1 - t) + (1 - p) t     (1 - p_t of the paper)
//                                          ce = log(1 + exp(-x)) t + log(1 + exp(x)) (1 - t)
//                                          alpha_t = alpha t + (1 - alpha) (1 - t); 1 if alpha < 0
//   d loss / dx = alpha_t * q^gamma * (gamma * (1 - 2 t) * p (1 - p) / q * ce + p - t)
//
//   inputs   x: any shape, any strides, a floating dtype
//   targets  t: the shape and dtype of inputs; or int64 class ids of the shape of inputs without
//   its
//            last axis: t = 1 where the last index is the id, 0 elsewhere, so an id outside [0, C)
//            is the background
//   out      the shape and dtype of inputs, contiguous
//
// Nothing overflows or cancels: p, 1 - p and both logs come from exp(-|x|), and an infinite x has
// the limit's loss and gradient. fp32 arithmetic for 16- and 32-bit floats, fp64 for fp64, one
// rounding at the end. NaN stays NaN. Deterministic. No torch here.
//
// Source: Lin et al., "Focal Loss for Dense Object Detection", ICCV 2017, equation 5.
#pragma once

#include <cmath>

#include "common/elementary.h"
#include "common/strided.h"

namespace opzoo {

enum FocalLossOperand { kFocalOut = 0, kFocalInputs = 1, kFocalTargets = 2, kFocalGrad = 3 };

struct SigmoidFocalLossParams {
  StridedLoop<4> loop;  // item number i is element i of out
  const void* inputs = nullptr;
  const void* targets = nullptr;
  const void* grad = nullptr;  // null: the loss; else: the gradient to inputs
  void* out = nullptr;
  int64_t classes = 0;  // of class ids; 0: targets has one number per element
  double alpha = 0;
  double gamma = 0;
};

// e = exp(-|x|) and log(1 + e). F is float with I int32_t, vectors of both, or double.
template <class I, class F>
OPZOO_ALWAYS_INLINE void focal_exponentials(const F& x, F& e, F& log_term) {
  if constexpr (std::is_same_v<F, double>) {
    e = exp(x < 0 ? x : -x);
    log_term = log1p(e);
  } else {
    exp_of_negative<I>(F(x < 0 ? x : -x), e);
    log_of_one_plus(e, log_term);
  }
}

// The factors of loss and gradient but for q^gamma, see the top of this file.
template <class F>
struct FocalFactors {
  F q;
  F cross_entropy;
  F alpha;
  F inner;  // (1 - 2 t) p (1 - p) / q * ce, to be multiplied by gamma
  F outer;  // p - t
};

template <class I, class F>
OPZOO_ALWAYS_INLINE void focal_factors(const F& x, const F& t, F alpha, FocalFactors<F>& factors) {
  const F zero{};
  F e, log_term;
  focal_exponentials<I>(x, e, log_term);
  const F larger = divide(F(1 + zero), F(1 + e));
  const F smaller = e * larger;
  const F p = x < 0 ? smaller : larger;
  const F not_p = x < 0 ? larger : smaller;
  const F not_t = 1 - t;
  const F if_positive = x < 0 ? -x : zero;  // of |x|, what t = 1 pays
  const F if_negative = x < 0 ? zero : x;
  factors.q = p * not_t + not_p * t;
  // An infinite |x| costs nothing where its label is right: 0 times infinity is avoided.
  factors.cross_entropy =
      log_term + (t == 0 ? zero : t * if_positive) + (not_t == 0 ? zero : not_t * if_negative);
  factors.alpha = alpha < 0 ? 1 + zero : alpha * t + (1 - alpha) * not_t;
  // For t = 0 and 1 the ratio is 1 - p and p; it is 1 where q has vanished.
  const F ratio = factors.q == 0 ? 1 + zero : divide(F(p * not_p), factors.q);
  factors.inner = (not_t - t) * (ratio == 0 ? zero : ratio * factors.cross_entropy);
  factors.outer = p * not_t - not_p * t;
}

template <class F>
OPZOO_HOST_DEVICE F focal_power(F q, F gamma) {
  return gamma == 2 ? q * q : pow(q, gamma);
}

// One element: the loss, or, with kBackward, grad times its derivative.
template <bool kBackward, class acc>
OPZOO_HOST_DEVICE acc focal_value(acc x, acc t, acc grad, acc alpha, acc gamma) {
  FocalFactors<acc> f;
  focal_factors<int32_t>(x, t, alpha, f);
  const acc scale = f.alpha * focal_power(f.q, gamma);
  if constexpr (kBackward) return grad * (scale * (gamma * f.inner + f.outer));
  return scale * f.cross_entropy;
}

// t of the element with this number, whose target lies there.
template <class T>
OPZOO_HOST_DEVICE acc_t<T> focal_target(const SigmoidFocalLossParams& p,
                                        int64_t item,
                                        int64_t offset) {
  if (p.classes == 0) return static_cast<acc_t<T>>(static_cast<const T*>(p.targets)[offset]);
  return static_cast<const int64_t*>(p.targets)[offset] == item % p.classes ? 1 : 0;
}

}  // namespace opzoo
