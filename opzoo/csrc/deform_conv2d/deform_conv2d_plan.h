// SPDX-License-Identifier: Apache-2.0
// The device-independent half of deform_conv2d: checks, chunking and the order of the steps.
// Defined in deform_conv2d.cpp.
#pragma once

#include "common/dispatch.h"
#include "deform_conv2d/deform_conv2d.h"

namespace opzoo {

struct DeformConvGeometry {
  int64_t stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
};

// What the fp32 products of a forward on a GPU may cost in accuracy. Everything else ignores it.
enum class DeformConvPrecision : int64_t {
  kIeee = 0,  // fp32's accuracy
  kTf32 = 1,  // operands rounded to 10 bits of fraction, sums in fp32
};

// Which forward, for tests: the others must be right too.
enum class DeformConvMethod : int64_t {
  kBest = 0,      // the first that applies
  kPortable = 1,  // without those for Hopper alone
  kColumns = 2,   // the general one
};

struct DeformConvArgs {
  const Tensor& input;
  const Tensor& offset;
  const Tensor& weight;
  const OptionalTensor& mask;
  DeformConvGeometry geometry;
  DeformConvPrecision precision = DeformConvPrecision::kIeee;
  DeformConvMethod method = DeformConvMethod::kBest;
};

struct DeformConvNeeds {
  bool input, offset, weight, mask;
};

using DeformConvGrads = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// What a device supplies. Matrices are contiguous, [groups, rows per group, chunk.count].
class DeformConvDevice {
 public:
  virtual ~DeformConvDevice() = default;

  // The dtype of columns, and of the weight and gradient they are multiplied with.
  virtual ScalarType column_dtype(ScalarType storage) const = 0;
  // What the matrices of one chunk may take together.
  virtual int64_t workspace_bytes() const = 0;

  // The whole forward without columns, where the device has a kernel for it and the shapes allow
  // that one; false, and nothing done, elsewhere.
  virtual bool run_implicit(const DeformConvParams& p,
                            const DeformConvArgs& args,
                            const OptionalTensor& bias,
                            Tensor& out) const {
    return false;
  }
  // columns = mask * bilinear(input).
  virtual void sample_columns(const DeformConvParams& p,
                              ScalarType dtype,
                              PixelChunk chunk,
                              Tensor& columns) const = 0;
  // out = products + bias, rounded once.
  virtual void write_output(const DeformConvParams& p,
                            PixelChunk chunk,
                            const Tensor& products,
                            const OptionalTensor& bias,
                            Tensor& out) const = 0;
  // matrix = the chunk of grad, which has any strides.
  virtual void read_grad(const DeformConvParams& p,
                         PixelChunk chunk,
                         const Tensor& grad,
                         Tensor& matrix) const = 0;
  // Writes the gradients whose data is not null.
  virtual void write_offset_grad(const DeformConvParams& p,
                                 ScalarType dtype,
                                 PixelChunk chunk,
                                 const Tensor& grad_columns,
                                 const FloatImage& grad_offset,
                                 const FloatImage& grad_mask) const = 0;
  // grad_input += what the chunk spreads over it; dtype is input's, grad_input the accumulator's.
  virtual void add_input_grad(const DeformConvParams& p,
                              ScalarType dtype,
                              PixelChunk chunk,
                              const Tensor& grad_columns,
                              Tensor& grad_input) const = 0;
  // sum += part, both contiguous and of the accumulator's dtype.
  virtual void add_to(Tensor& sum, const Tensor& part) const = 0;
};

inline ScalarType accumulator_dtype(ScalarType storage) {
  return storage == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

inline ImageStrides image_strides(const Tensor& t) {
  return {t.stride(0), t.stride(1), t.stride(2), t.stride(3)};
}

Tensor deform_conv2d_forward(const DeformConvDevice& device,
                             const DeformConvArgs& args,
                             const OptionalTensor& bias);

DeformConvGrads deform_conv2d_backward(const DeformConvDevice& device,
                                       const Tensor& grad,
                                       const DeformConvArgs& args,
                                       DeformConvNeeds needs);

}  // namespace opzoo
