// SPDX-License-Identifier: Apache-2.0
// The loops of roi_align_cpu.cpp that live in files of their own, for all four types.
#pragma once

#include "roi_align/roi_align.h"

namespace opzoo {

// rows[k] is the row of output or grad that belongs to RoI k; null: k itself.
template <class T>
void average_forward(const RoIAlignParams& p,
                     const T* input,
                     T* output,
                     const int64_t* rows = nullptr);

// Backward functions write all of grad_input.
template <class T>
void average_backward(const RoIAlignParams& p,
                      const T* grad,
                      T* grad_input,
                      const int64_t* rows = nullptr);
template <class T>
void maximum_backward(const RoIAlignParams& p, const T* grad, const int64_t* argmax, T* grad_input);

}  // namespace opzoo
