// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "deform_conv2d/deform_conv2d_plan.h"

namespace opzoo {
namespace {

// Pixels whose geometry is computed once and shared by all channels of an offset group.
constexpr int64_t kPixelBlock = 64;
// Channels one thread adds gradients to: few enough to spread over threads, many enough to share
// the geometry.
constexpr int64_t kChannelSlice = 16;
// Samples below which another thread costs more than it brings.
constexpr int64_t kGrain = 16384;

template <class acc>
struct SampleBlock {
  int64_t length;
  DeformSample<acc> sample[kPixelBlock];
  Corners corners[kPixelBlock];
};

template <class acc>
void fill_block(const DeformConvParams& p,
                int64_t first,
                int64_t length,
                int64_t offset_group,
                int64_t tap,
                const ImageStrides& strides,
                SampleBlock<acc>& block) {
  block.length = length;
  OutputPixel pixel = output_pixel(p, first);
  for (int64_t i = 0; i < length; ++i, pixel = next_pixel(p, pixel)) {
    block.sample[i] = deform_sample<acc>(p, pixel, offset_group, tap);
    block.corners[i] = corners_of(block.sample[i], pixel.n, strides);
  }
}

int64_t grain_for(int64_t samples_per_item) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, samples_per_item));
}

// body(offset group, tap, first pixel within the chunk, length), in parallel: each thread owns its
// block of pixels in all rows of a group and tap.
template <class Body>
void for_each_block(const DeformConvParams& p, PixelChunk chunk, const Body& body) {
  const int64_t blocks = div_up(chunk.count, kPixelBlock);
  const int64_t items = p.offset_groups * p.taps() * blocks;
  const int64_t samples = std::min(chunk.count, kPixelBlock) * p.group_channels();
  parallel_for(0, items, grain_for(samples), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t row = item / blocks;
      const int64_t start = (item - row * blocks) * kPixelBlock;
      const int64_t length = std::min(kPixelBlock, chunk.count - start);
      body(row / p.taps(), row % p.taps(), start, length);
    }
  });
}

template <class T>
void sample_columns_of(const DeformConvParams& p, PixelChunk chunk, acc_t<T>* columns) {
  const T* input = static_cast<const T*>(p.input);
  for_each_block(p, chunk, [&](int64_t group, int64_t tap, int64_t start, int64_t length) {
    SampleBlock<acc_t<T>> block;
    fill_block(p, chunk.first + start, length, group, tap, p.input_strides, block);
    for (int64_t within = 0; within < p.group_channels(); ++within) {
      const int64_t c = group * p.group_channels() + within;
      const T* channel = input + c * p.input_strides.c;
      acc_t<T>* row = columns + (c * p.taps() + tap) * chunk.count + start;
      for (int64_t i = 0; i < length; ++i) {
        const DeformSample<acc_t<T>>& sample = block.sample[i];
        row[i] = sample.mask * sample_value(sample, block.corners[i], channel);
      }
    }
  });
}

template <class T>
void write_output_of(const DeformConvParams& p,
                     PixelChunk chunk,
                     const acc_t<T>* products,
                     const T* bias,
                     int64_t bias_stride,
                     const ImageStrides& strides,
                     T* out) {
  parallel_for(0, p.K, grain_for(chunk.count), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const acc_t<T> shift = bias ? static_cast<acc_t<T>>(bias[k * bias_stride]) : acc_t<T>(0);
      const acc_t<T>* row = products + k * chunk.count;
      OutputPixel pixel = output_pixel(p, chunk.first);
      for (int64_t i = 0; i < chunk.count; ++i, pixel = next_pixel(p, pixel)) {
        out[index_of(strides, pixel, k)] = static_cast<T>(row[i] + shift);
      }
    }
  });
}

template <class T>
void read_grad_of(const DeformConvParams& p,
                  PixelChunk chunk,
                  const T* grad,
                  const ImageStrides& strides,
                  acc_t<T>* matrix) {
  parallel_for(0, p.K, grain_for(chunk.count), [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      acc_t<T>* row = matrix + k * chunk.count;
      OutputPixel pixel = output_pixel(p, chunk.first);
      for (int64_t i = 0; i < chunk.count; ++i, pixel = next_pixel(p, pixel)) {
        row[i] = static_cast<acc_t<T>>(grad[index_of(strides, pixel, k)]);
      }
    }
  });
}

template <class T>
void write_offset_grad_of(const DeformConvParams& p,
                          PixelChunk chunk,
                          const acc_t<T>* grad_columns,
                          const FloatImage& grad_offset,
                          const FloatImage& grad_mask) {
  using acc = acc_t<T>;
  const T* input = static_cast<const T*>(p.input);
  for_each_block(p, chunk, [&](int64_t group, int64_t tap, int64_t start, int64_t length) {
    SampleBlock<acc> block;
    fill_block(p, chunk.first + start, length, group, tap, p.input_strides, block);
    SampledValue<acc> sum[kPixelBlock] = {};
    for (int64_t within = 0; within < p.group_channels(); ++within) {
      const int64_t c = group * p.group_channels() + within;
      const T* channel = input + c * p.input_strides.c;
      const acc* row = grad_columns + (c * p.taps() + tap) * chunk.count + start;
      for (int64_t i = 0; i < length; ++i) {
        if (!block.sample[i].inside) continue;
        const SampledValue<acc> v = sample_with_slopes(block.sample[i], block.corners[i], channel);
        sum[i].value += row[i] * v.value;
        sum[i].slope_y += row[i] * v.slope_y;
        sum[i].slope_x += row[i] * v.slope_x;
      }
    }
    OutputPixel pixel = output_pixel(p, chunk.first + start);
    for (int64_t i = 0; i < length; ++i, pixel = next_pixel(p, pixel)) {
      write_offset_sums(p, pixel, group, tap, block.sample[i], sum[i], grad_offset, grad_mask);
    }
  });
}

// In parallel over images and slices of channels: no two threads add to one element, and each adds
// its taps and pixels in order.
template <class T>
void add_input_grad_of(const DeformConvParams& p,
                       PixelChunk chunk,
                       const acc_t<T>* grad_columns,
                       const ImageStrides& strides,
                       acc_t<T>* grad_input) {
  const int64_t per_image = p.OH * p.OW;
  const int64_t end_pixel = chunk.first + chunk.count;
  const int64_t first_image = chunk.first / per_image;
  const int64_t images = div_up(end_pixel, per_image) - first_image;
  const int64_t slices = div_up(p.group_channels(), kChannelSlice);
  const int64_t items = images * p.offset_groups * slices;
  const int64_t samples =
      chunk.count / images * p.taps() * std::min(kChannelSlice, p.group_channels());

  const auto add_slice = [&](int64_t image, int64_t group, int64_t slice) {
    const int64_t first_channel = group * p.group_channels() + slice * kChannelSlice;
    const int64_t end_channel =
        std::min(first_channel + kChannelSlice, (group + 1) * p.group_channels());
    const int64_t begin = std::max(chunk.first, image * per_image);
    const int64_t end = std::min(end_pixel, (image + 1) * per_image);
    SampleBlock<acc_t<T>> block;
    for (int64_t tap = 0; tap < p.taps(); ++tap) {
      for (int64_t pixel = begin; pixel < end; pixel += kPixelBlock) {
        fill_block(p, pixel, std::min(kPixelBlock, end - pixel), group, tap, strides, block);
        for (int64_t c = first_channel; c < end_channel; ++c) {
          acc_t<T>* channel = grad_input + c * strides.c;
          const acc_t<T>* row =
              grad_columns + (c * p.taps() + tap) * chunk.count + (pixel - chunk.first);
          for (int64_t i = 0; i < block.length; ++i) {
            spread_gradient(block.sample[i],
                            block.corners[i],
                            row[i] * block.sample[i].mask,
                            [&](int64_t at, acc_t<T> share) { channel[at] += share; });
          }
        }
      }
    }
  };
  parallel_for(0, items, grain_for(samples), [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t slice = item % slices;
      const int64_t group = item / slices % p.offset_groups;
      add_slice(first_image + item / slices / p.offset_groups, group, slice);
    }
  });
}

// Columns are in the accumulator's dtype: half inputs are exact until the last rounding.
class DeformConvCpu final : public DeformConvDevice {
 public:
  ScalarType column_dtype(ScalarType storage) const override { return accumulator_dtype(storage); }
  int64_t workspace_bytes() const override { return int64_t{16} << 20; }

  void sample_columns(const DeformConvParams& p,
                      ScalarType dtype,
                      PixelChunk chunk,
                      Tensor& columns) const override {
    dispatch_floating(dtype, "deform_conv2d", [&]<class T>() {
      sample_columns_of<T>(p, chunk, mutable_data<acc_t<T>>(columns));
    });
  }

  void write_output(const DeformConvParams& p,
                    PixelChunk chunk,
                    const Tensor& products,
                    const OptionalTensor& bias,
                    Tensor& out) const override {
    dispatch_floating(out.scalar_type(), "deform_conv2d", [&]<class T>() {
      write_output_of<T>(p,
                         chunk,
                         data<acc_t<T>>(products),
                         bias ? data<T>(*bias) : nullptr,
                         bias ? bias->stride(0) : 0,
                         image_strides(out),
                         mutable_data<T>(out));
    });
  }

  void read_grad(const DeformConvParams& p,
                 PixelChunk chunk,
                 const Tensor& grad,
                 Tensor& matrix) const override {
    dispatch_floating(grad.scalar_type(), "_deform_conv2d_backward", [&]<class T>() {
      read_grad_of<T>(p, chunk, data<T>(grad), image_strides(grad), mutable_data<acc_t<T>>(matrix));
    });
  }

  void write_offset_grad(const DeformConvParams& p,
                         ScalarType dtype,
                         PixelChunk chunk,
                         const Tensor& grad_columns,
                         const FloatImage& grad_offset,
                         const FloatImage& grad_mask) const override {
    dispatch_floating(dtype, "_deform_conv2d_backward", [&]<class T>() {
      write_offset_grad_of<T>(p, chunk, data<acc_t<T>>(grad_columns), grad_offset, grad_mask);
    });
  }

  void add_input_grad(const DeformConvParams& p,
                      ScalarType dtype,
                      PixelChunk chunk,
                      const Tensor& grad_columns,
                      Tensor& grad_input) const override {
    dispatch_floating(dtype, "_deform_conv2d_backward", [&]<class T>() {
      add_input_grad_of<T>(p,
                           chunk,
                           data<acc_t<T>>(grad_columns),
                           image_strides(grad_input),
                           mutable_data<acc_t<T>>(grad_input));
    });
  }

  void add_to(Tensor& sum, const Tensor& part) const override {
    dispatch_floating(sum.scalar_type(), "_deform_conv2d_backward", [&]<class T>() {
      T* total = mutable_data<T>(sum);
      const T* addend = data<T>(part);
      for (int64_t i = 0; i < sum.numel(); ++i) total[i] = static_cast<T>(total[i] + addend[i]);
    });
  }
};

Tensor deform_conv2d_cpu(const Tensor& input,
                         const Tensor& offset,
                         const Tensor& weight,
                         const OptionalTensor& bias,
                         const OptionalTensor& mask,
                         int64_t stride_h,
                         int64_t stride_w,
                         int64_t pad_h,
                         int64_t pad_w,
                         int64_t dilation_h,
                         int64_t dilation_w,
                         int64_t precision,
                         int64_t method) {
  const DeformConvArgs args{input,
                            offset,
                            weight,
                            mask,
                            {stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w},
                            DeformConvPrecision{precision},
                            DeformConvMethod{method}};
  return deform_conv2d_forward(DeformConvCpu(), args, bias);
}

DeformConvGrads deform_conv2d_backward_cpu(const Tensor& grad,
                                           const Tensor& input,
                                           const Tensor& offset,
                                           const Tensor& weight,
                                           const OptionalTensor& mask,
                                           int64_t stride_h,
                                           int64_t stride_w,
                                           int64_t pad_h,
                                           int64_t pad_w,
                                           int64_t dilation_h,
                                           int64_t dilation_w,
                                           bool need_input,
                                           bool need_offset,
                                           bool need_weight,
                                           bool need_mask) {
  const DeformConvArgs args{
      input, offset, weight, mask, {stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w}};
  return deform_conv2d_backward(
      DeformConvCpu(), grad, args, {need_input, need_offset, need_weight, need_mask});
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CPU, m) {
  m.impl("deform_conv2d", OPZOO_BOX(opzoo::deform_conv2d_cpu));
  m.impl("_deform_conv2d_backward", OPZOO_BOX(opzoo::deform_conv2d_backward_cpu));
}
