// SPDX-License-Identifier: Apache-2.0
// What the host halves of the CUDA kernels share: layouts, and the check of debug mode.
#pragma once

#include "roi_align/roi_align_kernel.cuh"
#include "roi_align/roi_align_plan.h"

namespace opzoo {

inline int64_t pooled_items_of(const RoIAlignParams& p) {
  return p.rois * p.channels * p.pooled_height * p.pooled_width;
}

// body<kChannelsLast>() for the layout of a dense tensor. Where both layouts hold, either serves.
template <class Body>
void dispatch_layout(const Tensor& t, Body&& body) {
  if (is_channels_last(t)) {
    body.template operator()<true>();
  } else {
    body.template operator()<false>();
  }
}

// In debug mode only: waits for the device and raises where a RoI would be skipped.
template <class acc>
void check_image_indices_typed(const char* op, const RoIAlignPlan& plan, cudaStream_t stream) {
  const RoIAlignParams& p = plan.params;
  const Tensor flag = empty({1}, ScalarType::Long, plan.boxes);
  auto* first_bad = mutable_data<unsigned long long>(flag);
  auto k = static_cast<unsigned long long>(p.rois);
  check_cuda(cudaMemcpyAsync(first_bad, &k, sizeof(k), cudaMemcpyHostToDevice, stream), op);
  roi_align_check_kernel<acc><<<grid_for(p.rois), kBlockSize, 0, stream>>>(p, first_bad);
  check_launch(op);
  check_cuda(cudaMemcpyAsync(&k, first_bad, sizeof(k), cudaMemcpyDeviceToHost, stream), op);
  check_cuda(cudaStreamSynchronize(stream), op);
  if (k == static_cast<unsigned long long>(p.rois)) return;

  const auto bad = static_cast<int64_t>(k);
  std::ostringstream text;
  const auto fetch = [&](auto value, const void* source) {
    check_cuda(cudaMemcpyAsync(&value, source, sizeof(value), cudaMemcpyDeviceToHost, stream), op);
    check_cuda(cudaStreamSynchronize(stream), op);
    text << value;
  };
  if (p.batch_index) {
    fetch(int64_t{0}, p.batch_index + bad * p.batch_index_stride);
  } else {
    fetch(acc(0), static_cast<const acc*>(p.boxes) + bad * p.boxes_stride[0]);
  }
  refuse_image_index(op, p, bad, text.str());
}

inline void check_image_indices(const char* op, const RoIAlignPlan& plan, cudaStream_t stream) {
  if (!debug_mode() || plan.params.rois == 0) return;
  dispatch_floating(plan.boxes.scalar_type(), op, [&]<class T>() {
    check_image_indices_typed<acc_t<T>>(op, plan, stream);
  });
}

// The average backward counts the pixels of an axis and the bins of 32 RoIs in 32 bits. An expanded
// grad has elements without memory behind them; its copy would have.
inline void check_average_backward(const char* op, const RoIAlignParams& p) {
  constexpr int64_t kMaxSide = int64_t{1} << 30;
  constexpr double kMaxBins = 1 << 25;
  constexpr double kMaxElements = 0x1p40;
  OPZOO_CHECK(p.height <= kMaxSide && p.width <= kMaxSide,
              op,
              "grad_input must have at most 1073741824 rows and columns on CUDA, got [",
              p.height,
              ", ",
              p.width,
              "]");
  const double bins = static_cast<double>(p.pooled_height) * static_cast<double>(p.pooled_width);
  const double elements =
      bins * static_cast<double>(p.rois) * static_cast<double>(std::max<int64_t>(p.channels, 1));
  OPZOO_CHECK(bins <= kMaxBins && elements <= kMaxElements,
              op,
              "grad must have at most 2^25 bins and 2^40 elements on CUDA, got [",
              p.rois,
              ", ",
              p.channels,
              ", ",
              p.pooled_height,
              ", ",
              p.pooled_width,
              "]");
}

}  // namespace opzoo
