// SPDX-License-Identifier: Apache-2.0
// Schema, checks and the order of the steps, chunk by chunk:
//   forward   columns -> weight @ columns -> out, or in one kernel where the device has it
//   backward  columns -> grad @ columns^T -> grad_weight
//             weight^T @ grad -> grad_columns -> grad_offset, grad_mask, grad_input
#include <algorithm>

#include "deform_conv2d/deform_conv2d_plan.h"

namespace opzoo {
namespace {

// Above any real map, and low enough that no coordinate formula leaves int64.
constexpr int64_t kMaxExtent = std::numeric_limits<int32_t>::max();

int64_t checked_product(const char* op, std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors) {
    OPZOO_CHECK_VALUE(!__builtin_mul_overflow(product, factor, &product),
                      op,
                      "sizes are too large: a product of them does not fit 64 bits");
  }
  return product;
}

void check_number(const char* op, const char* name, int64_t value, int64_t least) {
  OPZOO_CHECK_VALUE(value >= least && value <= kMaxExtent,
                    op,
                    name,
                    " must be in [",
                    least,
                    ", ",
                    kMaxExtent,
                    "], got ",
                    value);
}

void check_geometry(const char* op, const DeformConvGeometry& g) {
  check_number(op, "stride_h", g.stride_h, 1);
  check_number(op, "stride_w", g.stride_w, 1);
  check_number(op, "pad_h", g.pad_h, 0);
  check_number(op, "pad_w", g.pad_w, 0);
  check_number(op, "dilation_h", g.dilation_h, 1);
  check_number(op, "dilation_w", g.dilation_w, 1);
}

void check_operand(
    const char* op, const char* name, const Tensor& t, int64_t rank, const Tensor& input) {
  check_rank(op, name, t, rank);
  check_floating(op, name, t);
  check_same_device(op, name, t, "input", input);
}

void check_operands(const char* op, const DeformConvArgs& a) {
  check_operand(op, "input", a.input, 4, a.input);
  check_operand(op, "offset", a.offset, 4, a.input);
  check_operand(op, "weight", a.weight, 4, a.input);
  check_same_dtype(op, "weight", a.weight, "input", a.input);
  if (a.mask) check_operand(op, "mask", *a.mask, 4, a.input);
}

// All factors are below 2^31 once they passed: dilation * (kernel - 1) cannot overflow.
int64_t output_size(const char* op,
                    const char* axis,
                    int64_t size,
                    int64_t kernel,
                    int64_t stride,
                    int64_t pad,
                    int64_t dilation) {
  OPZOO_CHECK(size > 0 && size <= kMaxExtent && kernel > 0 && kernel <= kMaxExtent,
              op,
              "input and weight must have between 1 and ",
              kMaxExtent,
              " pixels along ",
              axis,
              ", got ",
              size,
              " and ",
              kernel);
  const int64_t room = size + 2 * pad - dilation * (kernel - 1) - 1;
  OPZOO_CHECK_VALUE(room >= 0,
                    op,
                    "the output would be empty along ",
                    axis,
                    ": input ",
                    size,
                    ", kernel ",
                    kernel,
                    ", padding ",
                    pad,
                    ", dilation ",
                    dilation);
  return room / stride + 1;
}

void check_channels(const char* op, const DeformConvArgs& a, DeformConvParams& p) {
  const int64_t per_group = a.weight.size(1);
  OPZOO_CHECK(p.C > 0 && per_group > 0,
              op,
              "input and weight must have at least one input channel, got shapes ",
              shape(a.input),
              " and ",
              shape(a.weight));
  OPZOO_CHECK(p.C % per_group == 0,
              op,
              "input channels must be a multiple of weight.shape[1] = ",
              per_group,
              ", got ",
              p.C);
  p.weight_groups = p.C / per_group;
  OPZOO_CHECK(p.K % p.weight_groups == 0,
              op,
              "weight.shape[0] must be a multiple of the ",
              p.weight_groups,
              " groups, got ",
              p.K);
  const int64_t per_offset_group = checked_product(op, {2, p.kernel_h, p.kernel_w});
  const int64_t channels = a.offset.size(1);
  OPZOO_CHECK(channels > 0 && channels % per_offset_group == 0,
              op,
              "offset.shape[1] must be a positive multiple of 2 * kernel height * kernel width = ",
              per_offset_group,
              ", got ",
              channels);
  p.offset_groups = channels / per_offset_group;
  OPZOO_CHECK(p.C % p.offset_groups == 0,
              op,
              "input channels must be a multiple of the ",
              p.offset_groups,
              " offset groups, got ",
              p.C);
}

FloatKind float_kind(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return FloatKind::kFloat64;
    case ScalarType::Float:
      return FloatKind::kFloat32;
    case ScalarType::Half:
      return FloatKind::kFloat16;
    default:
      return FloatKind::kBFloat16;
  }
}

// Only read from, except through the images of freshly allocated gradients.
FloatImage float_image(const Tensor& t) {
  return {const_cast<void*>(t.const_data_ptr()), float_kind(t.scalar_type()), image_strides(t)};
}

DeformConvParams plan(const char* op, const DeformConvArgs& a) {
  const DeformConvGeometry& g = a.geometry;
  check_geometry(op, g);
  check_operands(op, a);

  DeformConvParams p{};
  p.N = a.input.size(0);
  p.C = a.input.size(1);
  p.H = a.input.size(2);
  p.W = a.input.size(3);
  p.K = a.weight.size(0);
  p.kernel_h = a.weight.size(2);
  p.kernel_w = a.weight.size(3);
  p.stride_h = g.stride_h;
  p.stride_w = g.stride_w;
  p.pad_h = g.pad_h;
  p.pad_w = g.pad_w;
  p.dilation_h = g.dilation_h;
  p.dilation_w = g.dilation_w;
  p.OH = output_size(op, "height", p.H, p.kernel_h, g.stride_h, g.pad_h, g.dilation_h);
  p.OW = output_size(op, "width", p.W, p.kernel_w, g.stride_w, g.pad_w, g.dilation_w);
  check_channels(op, a, p);
  // With the bytes that a pixel takes in all matrices of a chunk.
  constexpr int64_t kBytes = 32;
  checked_product(op, {p.C, p.kernel_h, p.kernel_w, kBytes});
  checked_product(op, {p.N, p.OH, p.OW, std::max<int64_t>(p.K, 1), kBytes});
  check_shape(op, "offset", a.offset, {p.N, 2 * p.offset_groups * p.taps(), p.OH, p.OW});
  if (a.mask) check_shape(op, "mask", *a.mask, {p.N, p.offset_groups * p.taps(), p.OH, p.OW});

  p.input = a.input.const_data_ptr();
  p.input_strides = image_strides(a.input);
  p.offset = float_image(a.offset);
  if (a.mask && a.mask->numel() > 0) p.mask = float_image(*a.mask);
  return p;
}

Tensor empty_image(const Sizes& sizes, ScalarType dtype, const Tensor& layout) {
  const bool channels_last = is_channels_last(layout) && sizes[1] > 0;
  return empty_strided(sizes,
                       channels_last ? channels_last_strides(sizes) : contiguous_strides(sizes),
                       dtype,
                       layout);
}

// Even chunks of at most the device's workspace, whatever the batch: bytes is what one pixel takes.
int64_t chunk_pixels(const DeformConvParams& p, int64_t bytes, int64_t workspace) {
  constexpr int64_t kAlignment = 32;  // keeps the rows of a chunk aligned for the GEMM's loads
  const int64_t pixels = p.pixels();
  const int64_t limit = std::clamp<int64_t>(workspace / bytes, 1, pixels);
  const int64_t even = div_up(pixels, div_up(pixels, limit));
  const int64_t aligned = div_up(even, kAlignment) * kAlignment;
  return aligned <= limit ? aligned : even;
}

template <class Body>
void for_each_chunk(const DeformConvParams& p, int64_t step, const Body& body) {
  for (int64_t first = 0; first < p.pixels(); first += step) {
    body(PixelChunk{first, std::min(step, p.pixels() - first)});
  }
}

// The buffer itself, or a smaller one for the last chunk.
void fit(Tensor& matrix, const Sizes& sizes) {
  if (matrix.size(2) != sizes[2]) matrix = empty(sizes, matrix.scalar_type(), matrix);
}

// The first elements of a buffer, as a matrix for the last chunk: a second buffer would add to the
// memory of the first.
Tensor head(const Tensor& buffer, const Sizes& sizes) {
  Tensor flat = torch::stable::view(buffer, {buffer.numel()});
  const Tensor first = torch::stable::narrow(flat, 0, 0, sizes[0] * sizes[1] * sizes[2]);
  return torch::stable::view(first, sizes);
}

// a @ b for every group, with sums and result in the accumulator's dtype.
Tensor multiply(const char* op, const Tensor& a, const Tensor& b) {
  const ScalarType dtype = accumulator_dtype(a.scalar_type());
  std::array<StableIValue, 3> stack{torch::stable::detail::from(a),
                                    torch::stable::detail::from(b),
                                    torch::stable::detail::from(dtype)};
  const bool widen = dtype != a.scalar_type();
  OPZOO_TORCH_CALL(
      torch_call_dispatcher("aten::bmm", widen ? "dtype" : "", stack.data(), TORCH_ABI_VERSION));
  const Tensor product = torch::stable::detail::to<Tensor>(stack[0]);
  OPZOO_CHECK(product.scalar_type() == dtype && product.is_contiguous(),
              op,
              "aten::bmm returned ",
              dtype_name(product.scalar_type()),
              " where ",
              dtype_name(dtype),
              " was expected");
  return product;
}

Tensor weight_matrix(const DeformConvDevice& device,
                     const DeformConvParams& p,
                     const Tensor& weight) {
  const Tensor matrix =
      opzoo::contiguous(to_dtype(weight, device.column_dtype(weight.scalar_type())));
  const int64_t groups = p.weight_groups;
  return torch::stable::view(matrix, {groups, p.K / groups, p.rows() / groups});
}

// Results; those that are sums are zero before the first chunk, in the accumulator's dtype.
struct BackwardSums {
  Tensor input, offset, weight, mask;
};

Tensor empty_result(bool needed, const Sizes& sizes, ScalarType dtype, const Tensor& layout) {
  return needed ? empty_image(sizes, dtype, layout) : empty({0}, dtype, layout);
}

void run_backward(const DeformConvDevice& device,
                  const DeformConvParams& p,
                  const Tensor& grad,
                  const Tensor& weight_tensor,
                  DeformConvNeeds needs,
                  BackwardSums& sums) {
  constexpr const char* op = "_deform_conv2d_backward";
  const ScalarType dtype = grad.scalar_type();
  const int64_t groups = p.weight_groups;
  const int64_t group_rows = p.rows() / groups;
  const Tensor weight = weight_matrix(device, p, weight_tensor);
  const Tensor weight_t = torch::stable::transpose(weight, 1, 2);
  const int64_t bytes =
      p.rows() * (weight.element_size() + sums.weight.element_size()) + p.K * sizeof(double);
  const int64_t step = chunk_pixels(p, bytes, device.workspace_bytes());
  Tensor rows = empty({groups, p.K / groups, step}, weight.scalar_type(), grad);
  Tensor columns = empty({groups, group_rows, needs.weight ? step : 0}, weight.scalar_type(), grad);
  Tensor grad_weight = needs.weight
                           ? torch::stable::view(sums.weight, {groups, p.K / groups, group_rows})
                           : sums.weight;
  const FloatImage grad_offset = needs.offset ? float_image(sums.offset) : FloatImage{};
  const FloatImage grad_mask = needs.mask ? float_image(sums.mask) : FloatImage{};

  for_each_chunk(p, step, [&](PixelChunk chunk) {
    fit(rows, {groups, p.K / groups, chunk.count});
    device.read_grad(p, chunk, grad, rows);
    if (needs.weight) {
      fit(columns, {groups, group_rows, chunk.count});
      device.sample_columns(p, dtype, chunk, columns);
      device.add_to(grad_weight, multiply(op, rows, torch::stable::transpose(columns, 1, 2)));
    }
    if (!needs.input && !needs.offset && !needs.mask) return;
    const Tensor grad_columns = multiply(op, weight_t, rows);
    if (needs.offset || needs.mask) {
      device.write_offset_grad(p, dtype, chunk, grad_columns, grad_offset, grad_mask);
    }
    if (needs.input) device.add_input_grad(p, dtype, chunk, grad_columns, sums.input);
  });
}

}  // namespace

Tensor deform_conv2d_forward(const DeformConvDevice& device,
                             const DeformConvArgs& args,
                             const OptionalTensor& bias) {
  constexpr const char* op = "deform_conv2d";
  const DeformConvParams p = plan(op, args);
  const auto precision = static_cast<int64_t>(args.precision);
  const auto method = static_cast<int64_t>(args.method);
  OPZOO_CHECK_VALUE(precision == 0 || precision == 1,
                    op,
                    "precision must be 0 (ieee) or 1 (tf32), got ",
                    precision);
  OPZOO_CHECK_VALUE(method >= 0 && method <= 2,
                    op,
                    "method must be 0 (best), 1 (portable) or 2 (columns), got ",
                    method);
  const ScalarType dtype = args.input.scalar_type();
  if (bias) {
    check_operand(op, "bias", *bias, 1, args.input);
    check_same_dtype(op, "bias", *bias, "input", args.input);
    check_shape(op, "bias", *bias, {p.K});
  }
  Tensor out = empty_image({p.N, p.K, p.OH, p.OW}, dtype, args.input);
  if (out.numel() == 0) return out;
  if (args.method != DeformConvMethod::kColumns && device.run_implicit(p, args, bias, out)) {
    return out;
  }

  const int64_t groups = p.weight_groups;
  const Tensor weight = weight_matrix(device, p, args.weight);
  const ScalarType column_dtype = weight.scalar_type();
  const int64_t bytes = p.rows() * weight.element_size() + p.K * sizeof(double);
  const int64_t step = chunk_pixels(p, bytes, device.workspace_bytes());
  const Tensor buffer = empty({groups, p.rows() / groups, step}, column_dtype, args.input);
  for_each_chunk(p, step, [&](PixelChunk chunk) {
    Tensor columns = head(buffer, {groups, p.rows() / groups, chunk.count});
    device.sample_columns(p, dtype, chunk, columns);
    device.write_output(p, chunk, multiply(op, weight, columns), bias, out);
  });
  return out;
}

DeformConvGrads deform_conv2d_backward(const DeformConvDevice& device,
                                       const Tensor& grad,
                                       const DeformConvArgs& args,
                                       DeformConvNeeds needs) {
  constexpr const char* op = "_deform_conv2d_backward";
  const DeformConvParams p = plan(op, args);
  check_operand(op, "grad", grad, 4, args.input);
  check_same_dtype(op, "grad", grad, "input", args.input);
  check_shape(op, "grad", grad, {p.N, p.K, p.OH, p.OW});
  OPZOO_CHECK_VALUE(args.mask || !needs.mask, op, "need_mask is true, but there is no mask");

  const ScalarType dtype = args.input.scalar_type();
  const ScalarType sum_dtype = accumulator_dtype(dtype);
  const Tensor& mask = args.mask ? *args.mask : args.offset;
  BackwardSums sums{
      empty_result(needs.input, sizes_of(args.input), sum_dtype, args.input),
      empty_result(needs.offset, sizes_of(args.offset), args.offset.scalar_type(), args.offset),
      empty(needs.weight ? sizes_of(args.weight) : Sizes{0}, sum_dtype, args.input),
      empty_result(needs.mask, sizes_of(mask), mask.scalar_type(), mask)};
  torch::stable::zero_(sums.input);
  torch::stable::zero_(sums.weight);
  if (p.K == 0 || p.pixels() == 0) {
    torch::stable::zero_(sums.offset);
    torch::stable::zero_(sums.mask);
  } else {
    run_backward(device, p, grad, args.weight, needs, sums);
  }
  return {to_dtype(sums.input, dtype), sums.offset, to_dtype(sums.weight, dtype), sums.mask};
}

}  // namespace opzoo

OPZOO_SCHEMAS(m) {
  m.def(
      "deform_conv2d(Tensor input, Tensor offset, Tensor weight, Tensor? bias, Tensor? mask, "
      "int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, int dilation_w, "
      "int precision=0, int method=0) -> Tensor");
  m.def(
      "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor offset, Tensor weight, "
      "Tensor? mask, int stride_h, int stride_w, int pad_h, int pad_w, int dilation_h, "
      "int dilation_w, bool need_input, bool need_offset, bool need_weight, bool need_mask) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
}
