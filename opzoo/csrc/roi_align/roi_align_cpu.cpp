// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "roi_align/roi_align_average_cpu.h"
#include "roi_align/roi_align_plan.h"

namespace opzoo {
namespace {

// Channels that share the weights of a sample, and a thread's smallest piece of work.
constexpr int64_t kChannelBlock = 16;

struct ChannelBlock {
  int64_t outer;  // the RoI, or the image
  int64_t first, count;
};

int64_t channel_blocks(const RoIAlignParams& p) {
  return div_up(p.channels, kChannelBlock);
}

ChannelBlock channel_block(const RoIAlignParams& p, int64_t item) {
  const int64_t blocks = channel_blocks(p);
  const int64_t first = item % blocks * kChannelBlock;
  return {item / blocks, first, std::min(kChannelBlock, p.channels - first)};
}

// Every (RoI, channel block): body(roi, k, block, offset of the block in the pooled tensor).
template <class acc, class Body>
void for_each_roi_block(const RoIAlignParams& p, const Body& body) {
  parallel_for(0, p.rois * channel_blocks(p), 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const ChannelBlock block = channel_block(p, item);
      body(read_roi<acc>(p, block.outer), block);
    }
  });
}

// Every bin of a RoI: body(ph, pw).
template <class Body>
void for_each_bin(const RoIAlignParams& p, const Body& body) {
  for (int64_t ph = 0; ph < p.pooled_height; ++ph) {
    for (int64_t pw = 0; pw < p.pooled_width; ++pw) body(ph, pw);
  }
}

int64_t bin_offset(const int64_t (&stride)[4], int64_t k, int64_t c, int64_t ph, int64_t pw) {
  return k * stride[kRoIBatch] + c * stride[kRoIChannel] + ph * stride[kRoIRow] +
         pw * stride[kRoIColumn];
}

int64_t plane_offset(const RoIAlignParams& p, int64_t image, int64_t c) {
  return image * p.map_stride[kRoIBatch] + c * p.map_stride[kRoIChannel];
}

template <class T>
void maximum_forward(const RoIAlignParams& p, const T* input, T* output, int64_t* argmax) {
  using acc = acc_t<T>;
  const int64_t map_step = p.map_stride[kRoIChannel];
  const int64_t step = p.pooled_stride[kRoIChannel];
  for_each_roi_block<acc>(p, [&](const RoI<acc>& roi, const ChannelBlock& block) {
    const T* map = input + plane_offset(p, roi.image, block.first);
    for_each_bin(p, [&](int64_t ph, int64_t pw) {
      BinMaximum<acc> best[kChannelBlock];
      const auto inside = [&](const PlaneTap<acc>& tap, int64_t sample) {
        for (int64_t c = 0; c < block.count; ++c) {
          best[c].offer(value_at(map + c * map_step, tap), sample);
        }
      };
      const auto outside = [&] {
        for (int64_t c = 0; c < block.count; ++c) best[c].offer(acc(0), -1);
      };
      visit_bin(p, roi, ph, pw, inside, outside);
      // argmax has output's strides.
      const int64_t bin = bin_offset(p.pooled_stride, block.outer, block.first, ph, pw);
      for (int64_t c = 0; c < block.count; ++c) {
        output[bin + c * step] = static_cast<T>(best[c].value);
        argmax[bin + c * step] = best[c].argmax;
      }
    });
  });
}

template <class T>
void sample_forward(const RoIAlignParams& p, const T* input, const int64_t* argmax, T* output) {
  using acc = acc_t<T>;
  for_each_roi_block<acc>(p, [&](const RoI<acc>& roi, const ChannelBlock& block) {
    for (int64_t c = block.first; c < block.first + block.count; ++c) {
      const T* plane = input + plane_offset(p, roi.image, c);
      for_each_bin(p, [&](int64_t ph, int64_t pw) {
        const int64_t sample = argmax[bin_offset(p.argmax_stride, block.outer, c, ph, pw)];
        PlaneTap<acc> tap;
        const bool any = tap_of_sample(p, roi, ph, pw, sample, tap);
        output[bin_offset(p.pooled_stride, block.outer, c, ph, pw)] =
            static_cast<T>(any ? value_at(plane, tap) : acc(0));
      });
    }
  });
}

Tensor roi_align_cpu(const Tensor& input,
                     const Tensor& boxes,
                     const OptionalTensor& batch_index,
                     int64_t pooled_height,
                     int64_t pooled_width,
                     double spatial_scale,
                     int64_t sampling_ratio,
                     bool aligned) {
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan = plan_roi_align(
      "roi_align", input, boxes, batch_index, pooled_height, pooled_width, options, false);
  if (plan.out.numel() == 0) return plan.out;
  dispatch_floating(input.scalar_type(), "roi_align", [&]<class T>() {
    average_forward<T>(plan.params, data<T>(input), mutable_data<T>(plan.out));
  });
  return plan.out;
}

Tensor roi_align_backward_cpu(const Tensor& grad,
                              const Tensor& boxes,
                              const OptionalTensor& batch_index,
                              int64_t batch,
                              int64_t channels,
                              int64_t height,
                              int64_t width,
                              double spatial_scale,
                              int64_t sampling_ratio,
                              bool aligned,
                              bool channels_last) {
  constexpr const char* kOp = "_roi_align_backward";
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const Sizes sizes{batch, channels, height, width};
  const RoIAlignPlan plan = plan_roi_align_backward(
      kOp, grad, nullptr, boxes, batch_index, sizes, options, channels_last);
  if (plan.out.numel() == 0) return plan.out;
  dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
    average_backward<T>(plan.params, data<T>(grad), mutable_data<T>(plan.out));
  });
  return plan.out;
}

std::tuple<Tensor, Tensor> roi_align_max_cpu(const Tensor& input,
                                             const Tensor& boxes,
                                             const OptionalTensor& batch_index,
                                             int64_t pooled_height,
                                             int64_t pooled_width,
                                             double spatial_scale,
                                             int64_t sampling_ratio,
                                             bool aligned) {
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan = plan_roi_align(
      "_roi_align_max", input, boxes, batch_index, pooled_height, pooled_width, options, true);
  if (plan.out.numel() > 0) {
    dispatch_floating(input.scalar_type(), "_roi_align_max", [&]<class T>() {
      maximum_forward<T>(plan.params,
                         data<T>(input),
                         mutable_data<T>(plan.out),
                         mutable_data<int64_t>(plan.argmax));
    });
  }
  return {plan.out, plan.argmax};
}

Tensor roi_align_max_backward_cpu(const Tensor& grad,
                                  const Tensor& argmax,
                                  const Tensor& boxes,
                                  const OptionalTensor& batch_index,
                                  int64_t batch,
                                  int64_t channels,
                                  int64_t height,
                                  int64_t width,
                                  double spatial_scale,
                                  int64_t sampling_ratio,
                                  bool aligned,
                                  bool channels_last) {
  constexpr const char* kOp = "_roi_align_max_backward";
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const Sizes sizes{batch, channels, height, width};
  const RoIAlignPlan plan = plan_roi_align_backward(
      kOp, grad, &argmax, boxes, batch_index, sizes, options, channels_last);
  if (plan.out.numel() == 0) return plan.out;
  dispatch_floating(grad.scalar_type(), kOp, [&]<class T>() {
    maximum_backward<T>(
        plan.params, data<T>(grad), data<int64_t>(argmax), mutable_data<T>(plan.out));
  });
  return plan.out;
}

Tensor roi_align_max_sample_cpu(const Tensor& input,
                                const Tensor& argmax,
                                const Tensor& boxes,
                                const OptionalTensor& batch_index,
                                double spatial_scale,
                                int64_t sampling_ratio,
                                bool aligned) {
  constexpr const char* kOp = "_roi_align_max_sample";
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan = plan_roi_align_sample(kOp, input, argmax, boxes, batch_index, options);
  if (plan.out.numel() == 0) return plan.out;
  dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
    sample_forward<T>(
        plan.params, data<T>(input), data<int64_t>(argmax), mutable_data<T>(plan.out));
  });
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("roi_align", OPZOO_BOX(opzoo::roi_align_cpu));
  m.impl("_roi_align_backward", OPZOO_BOX(opzoo::roi_align_backward_cpu));
  m.impl("_roi_align_max", OPZOO_BOX(opzoo::roi_align_max_cpu));
  m.impl("_roi_align_max_backward", OPZOO_BOX(opzoo::roi_align_max_backward_cpu));
  m.impl("_roi_align_max_sample", OPZOO_BOX(opzoo::roi_align_max_sample_cpu));
}
