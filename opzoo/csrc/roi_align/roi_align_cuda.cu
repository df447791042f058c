// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_cuda_plan.h"
#include "roi_align/roi_align_forward_kernel.cuh"
#include "roi_align/roi_align_kernel.cuh"
#include "roi_align/roi_align_plan.h"

namespace opzoo {
namespace {

constexpr int kMaxShared =
    46 * 1024;  // what a block gets without asking, less the kernels' own arrays
constexpr int kBandBytes = 8 * 1024;  // per axis, for a grid that only the device knows

// The bands kernels address one image with 32-bit offsets.
bool takes_bands(const RoIAlignParams& p) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  if (p.pooled_height > kMaxBands || p.pooled_width > kMaxBands) return false;
  if (p.rois >= kLimit || p.channels >= kLimit / (p.pooled_height * p.pooled_width)) return false;
  const double extent =
      1.0 + static_cast<double>(p.height - 1) * static_cast<double>(p.map_stride[kRoIRow]) +
      static_cast<double>(p.width - 1) * static_cast<double>(p.map_stride[kRoIColumn]);
  return extent < static_cast<double>(kLimit) && p.height < kLimit && p.width < kLimit;
}

// channels_last with 16-byte vectors: every pixel starts on a 16-byte boundary.
template <class T>
bool takes_vectors(const RoIAlignParams& p, const T* input) {
  constexpr int64_t kVector = kVectorOf<T>;
  return takes_bands(p) && p.map_stride[kRoIChannel] == 1 && p.channels % kVector == 0 &&
         p.map_stride[kRoIBatch] % kVector == 0 && p.map_stride[kRoIRow] % kVector == 0 &&
         p.map_stride[kRoIColumn] % kVector == 0 && reinterpret_cast<uintptr_t>(input) % 16 == 0;
}

// Entries per bin. A bin of more gets the sample loop.
template <class acc>
int band_capacity(const RoIAlignParams& p, int64_t bins, int64_t size) {
  const int64_t room = kBandBytes / static_cast<int64_t>(bins * sizeof(BandEntry<acc>));
  const int64_t wanted = p.sampling_ratio > 0 ? std::min(2 * p.sampling_ratio, size) : size;
  const int64_t batches =
      std::max<int64_t>(std::min(room, wanted + kBandBatch - 1) / kBandBatch, 1);
  return static_cast<int>(batches * kBandBatch);
}

template <class T>
void launch_channels_last(const RoIAlignParams& p, const T* input, T* output, cudaStream_t stream) {
  using acc = acc_t<T>;
  const int rows = band_capacity<acc>(p, p.pooled_height, p.height);
  const int columns = band_capacity<acc>(p, p.pooled_width, p.width);
  const auto bytes = (p.pooled_height * rows + p.pooled_width * columns) * sizeof(BandEntry<acc>);
  // 256 bytes of channels per block (see the kernel). Few RoIs are split over their bins as well.
  constexpr int64_t kSlice = 16;
  constexpr int64_t kBlocksWanted = 1024;
  const int64_t vectors = p.channels / kVectorOf<T>;
  const int64_t slice = std::max(kSlice, div_up<int64_t>(vectors, 65535));
  const int64_t slices = div_up(vectors, slice);
  const int64_t items = p.pooled_height * p.pooled_width * slice;
  const int64_t split =
      std::clamp<int64_t>(kBlocksWanted / (p.rois * slices), 1, div_up<int64_t>(items, kBlockSize));
  const dim3 grid(
      static_cast<unsigned>(p.rois), static_cast<unsigned>(slices), static_cast<unsigned>(split));
  roi_align_bands_channels_last_kernel<T><<<grid, kBlockSize, bytes, stream>>>(
      p, input, output, rows, columns, static_cast<int>(slice));
}

template <class T, int kGroup>
void launch_contiguous_group(const RoIAlignParams& p,
                             const T* input,
                             T* output,
                             cudaStream_t stream) {
  using acc = acc_t<T>;
  const int rows = band_capacity<acc>(p, p.pooled_height, p.height);
  const int columns = band_capacity<acc>(p, p.pooled_width, p.width);
  const int64_t bins = p.pooled_height * p.pooled_width;
  const int64_t bands =
      (p.pooled_height * rows + p.pooled_width * columns) * sizeof(BandEntry<acc>);
  const int64_t per_warp = kGroup * (kColumnPitch * sizeof(acc) + bins * sizeof(T));
  int64_t warps = kBlockSize / 32;
  while (warps > 1 && bands + warps * per_warp > kMaxShared) warps /= 2;
  // Four groups of channels per warp: the weights are worth computing for those.
  const int64_t groups = div_up<int64_t>(p.channels, kGroup);
  const int64_t split = std::min<int64_t>(div_up(groups, 4 * warps), 65535);
  const dim3 grid(static_cast<unsigned>(p.rois), static_cast<unsigned>(split));
  roi_align_bands_contiguous_kernel<T, kGroup>
      <<<grid, static_cast<unsigned>(32 * warps), bands + warps * per_warp, stream>>>(
          p, input, output, rows, columns);
}

template <class T>
void launch_contiguous(const RoIAlignParams& p, const T* input, T* output, cudaStream_t stream) {
  if (p.pooled_width <= 8) {
    launch_contiguous_group<T, 4>(p, input, output, stream);
  } else if (p.pooled_width <= 16) {
    launch_contiguous_group<T, 2>(p, input, output, stream);
  } else {
    launch_contiguous_group<T, 1>(p, input, output, stream);
  }
}

template <class T>
void launch_average_of_samples(
    const RoIAlignParams& p, const T* input, T* output, bool channels_last, cudaStream_t stream) {
  const unsigned grid = grid_for(pooled_items_of(p));
  if (channels_last) {
    roi_align_average_kernel<T, true><<<grid, kBlockSize, 0, stream>>>(p, input, output);
  } else {
    roi_align_average_kernel<T, false><<<grid, kBlockSize, 0, stream>>>(p, input, output);
  }
}

Tensor roi_align_cuda(const Tensor& input,
                      const Tensor& boxes,
                      const OptionalTensor& batch_index,
                      int64_t pooled_height,
                      int64_t pooled_width,
                      double spatial_scale,
                      int64_t sampling_ratio,
                      bool aligned) {
  constexpr const char* kOp = "roi_align";
  const DeviceGuard guard(input.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan =
      plan_roi_align(kOp, input, boxes, batch_index, pooled_height, pooled_width, options, false);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(input);
  check_image_indices(kOp, plan, stream);
  if (pooled_items_of(p) == 0) return plan.out;
  dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
    const T* from = data<T>(input);
    T* to = mutable_data<T>(plan.out);
    const bool channels_last = is_channels_last(plan.out);
    if (channels_last && takes_vectors<T>(p, from)) {
      launch_channels_last(p, from, to, stream);
    } else if (!channels_last && takes_bands(p)) {
      launch_contiguous(p, from, to, stream);
    } else {
      launch_average_of_samples(p, from, to, channels_last, stream);
    }
  });
  check_launch(kOp);
  return plan.out;
}

std::tuple<Tensor, Tensor> roi_align_max_cuda(const Tensor& input,
                                              const Tensor& boxes,
                                              const OptionalTensor& batch_index,
                                              int64_t pooled_height,
                                              int64_t pooled_width,
                                              double spatial_scale,
                                              int64_t sampling_ratio,
                                              bool aligned) {
  constexpr const char* kOp = "_roi_align_max";
  const DeviceGuard guard(input.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan =
      plan_roi_align(kOp, input, boxes, batch_index, pooled_height, pooled_width, options, true);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(input);
  check_image_indices(kOp, plan, stream);
  if (pooled_items_of(p) > 0) {
    const unsigned grid = grid_for(pooled_items_of(p));
    dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
      dispatch_layout(plan.out, [&]<bool kChannelsLast>() {
        roi_align_maximum_kernel<T, kChannelsLast><<<grid, kBlockSize, 0, stream>>>(
            p, data<T>(input), mutable_data<T>(plan.out), mutable_data<int64_t>(plan.argmax));
      });
    });
    check_launch(kOp);
  }
  return {plan.out, plan.argmax};
}

Tensor roi_align_max_sample_cuda(const Tensor& input,
                                 const Tensor& argmax,
                                 const Tensor& boxes,
                                 const OptionalTensor& batch_index,
                                 double spatial_scale,
                                 int64_t sampling_ratio,
                                 bool aligned) {
  constexpr const char* kOp = "_roi_align_max_sample";
  const DeviceGuard guard(input.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan = plan_roi_align_sample(kOp, input, argmax, boxes, batch_index, options);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(input);
  check_image_indices(kOp, plan, stream);
  if (pooled_items_of(p) == 0) return plan.out;
  const unsigned grid = grid_for(pooled_items_of(p));
  dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
    dispatch_layout(plan.out, [&]<bool kChannelsLast>() {
      roi_align_sample_kernel<T, kChannelsLast><<<grid, kBlockSize, 0, stream>>>(
          p, data<T>(input), data<int64_t>(argmax), mutable_data<T>(plan.out));
    });
  });
  check_launch(kOp);
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("roi_align", OPZOO_BOX(opzoo::roi_align_cuda));
  m.impl("_roi_align_max", OPZOO_BOX(opzoo::roi_align_max_cuda));
  m.impl("_roi_align_max_sample", OPZOO_BOX(opzoo::roi_align_max_sample_cuda));
}
