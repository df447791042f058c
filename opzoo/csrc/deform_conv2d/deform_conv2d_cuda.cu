// SPDX-License-Identifier: Apache-2.0
#include "deform_conv2d/deform_conv2d_implicit_plan.h"
#include "deform_conv2d/deform_conv2d_kernel.cuh"
#include "deform_conv2d/deform_conv2d_plan.h"

namespace opzoo {
namespace {

constexpr const char* kForward = "deform_conv2d";
constexpr const char* kBackward = "_deform_conv2d_backward";

// Where input is not on CUDA, some other tensor is, and the checks refuse the call.
int32_t guard_index(const Tensor& input) {
  return input.is_cuda() ? input.get_device_index() : 0;
}

int64_t slice_items(const DeformConvParams& p, PixelChunk chunk) {
  return p.offset_groups * slices_per_group(p) * p.taps() * chunk.count;
}

// Columns are in the storage dtype, for the tensor cores; products and gradients of columns are in
// the accumulator's.
class DeformConvCuda final : public DeformConvDevice {
 public:
  ScalarType column_dtype(ScalarType storage) const override { return storage; }
  int64_t workspace_bytes() const override { return int64_t{40} << 20; }

  bool run_implicit(const DeformConvParams& p,
                    const DeformConvArgs& args,
                    const OptionalTensor& bias,
                    Tensor& out) const override {
    return run_deform_conv2d_implicit(p, args, bias, out);
  }

  void sample_columns(const DeformConvParams& p,
                      ScalarType dtype,
                      PixelChunk chunk,
                      Tensor& columns) const override {
    const cudaStream_t stream = current_stream(columns);
    const int64_t items = slice_items(p, chunk);
    dispatch_floating(dtype, kForward, [&]<class T>() {
      deform_conv2d_columns_kernel<T>
          <<<grid_for(items), kBlockSize, 0, stream>>>(p, chunk, mutable_data<T>(columns), items);
    });
    check_launch(kForward);
  }

  void write_output(const DeformConvParams& p,
                    PixelChunk chunk,
                    const Tensor& products,
                    const OptionalTensor& bias,
                    Tensor& out) const override {
    const cudaStream_t stream = current_stream(out);
    dispatch_floating(out.scalar_type(), kForward, [&]<class T>() {
      deform_conv2d_output_kernel<T>
          <<<grid_for(p.K * chunk.count), kBlockSize, 0, stream>>>(p,
                                                                   chunk,
                                                                   data<acc_t<T>>(products),
                                                                   bias ? data<T>(*bias) : nullptr,
                                                                   bias ? bias->stride(0) : 0,
                                                                   image_strides(out),
                                                                   mutable_data<T>(out));
    });
    check_launch(kForward);
  }

  void read_grad(const DeformConvParams& p,
                 PixelChunk chunk,
                 const Tensor& grad,
                 Tensor& matrix) const override {
    const cudaStream_t stream = current_stream(grad);
    dispatch_floating(grad.scalar_type(), kBackward, [&]<class T>() {
      deform_conv2d_read_grad_kernel<T><<<grid_for(p.K * chunk.count), kBlockSize, 0, stream>>>(
          p, chunk, data<T>(grad), image_strides(grad), mutable_data<T>(matrix));
    });
    check_launch(kBackward);
  }

  void write_offset_grad(const DeformConvParams& p,
                         ScalarType dtype,
                         PixelChunk chunk,
                         const Tensor& grad_columns,
                         const FloatImage& grad_offset,
                         const FloatImage& grad_mask) const override {
    const cudaStream_t stream = current_stream(grad_columns);
    const int64_t items = p.offset_groups * p.taps() * chunk.count;
    dispatch_floating(dtype, kBackward, [&]<class T>() {
      deform_conv2d_offset_grad_kernel<T><<<grid_for(items), kBlockSize, 0, stream>>>(
          p, chunk, data<acc_t<T>>(grad_columns), grad_offset, grad_mask);
    });
    check_launch(kBackward);
  }

  void add_input_grad(const DeformConvParams& p,
                      ScalarType dtype,
                      PixelChunk chunk,
                      const Tensor& grad_columns,
                      Tensor& grad_input) const override {
    const cudaStream_t stream = current_stream(grad_columns);
    const int64_t items = slice_items(p, chunk);
    dispatch_floating(dtype, kBackward, [&]<class T>() {
      deform_conv2d_input_grad_kernel<T>
          <<<grid_for(items), kBlockSize, 0, stream>>>(p,
                                                       chunk,
                                                       data<acc_t<T>>(grad_columns),
                                                       image_strides(grad_input),
                                                       mutable_data<acc_t<T>>(grad_input),
                                                       items);
    });
    check_launch(kBackward);
  }

  void add_to(Tensor& sum, const Tensor& part) const override {
    const cudaStream_t stream = current_stream(sum);
    dispatch_floating(sum.scalar_type(), kBackward, [&]<class T>() {
      if constexpr (std::is_same_v<T, acc_t<T>>) {
        deform_conv2d_add_kernel<T><<<grid_for(sum.numel()), kBlockSize, 0, stream>>>(
            mutable_data<T>(sum), data<T>(part), sum.numel());
      }
    });
    check_launch(kBackward);
  }
};

Tensor deform_conv2d_cuda(const Tensor& input,
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
  const DeviceGuard guard(guard_index(input));
  const DeformConvArgs args{input,
                            offset,
                            weight,
                            mask,
                            {stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w},
                            DeformConvPrecision{precision},
                            DeformConvMethod{method}};
  return deform_conv2d_forward(DeformConvCuda(), args, bias);
}

DeformConvGrads deform_conv2d_backward_cuda(const Tensor& grad,
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
  const DeviceGuard guard(guard_index(input));
  const DeformConvArgs args{
      input, offset, weight, mask, {stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w}};
  return deform_conv2d_backward(
      DeformConvCuda(), grad, args, {need_input, need_offset, need_weight, need_mask});
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("deform_conv2d", OPZOO_BOX(opzoo::deform_conv2d_cuda));
  m.impl("_deform_conv2d_backward", OPZOO_BOX(opzoo::deform_conv2d_backward_cuda));
}
