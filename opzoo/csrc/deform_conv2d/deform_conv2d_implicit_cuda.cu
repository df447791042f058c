// SPDX-License-Identifier: Apache-2.0
#include "deform_conv2d/deform_conv2d_implicit_kernel.cuh"
#include "deform_conv2d/deform_conv2d_implicit_plan.h"

namespace opzoo {
namespace {

constexpr const char* kOp = "deform_conv2d";

// Dense with channels fastest, rows of whole 16-byte vectors on their boundaries.
bool has_channel_vectors(const Tensor& t) {
  return is_channels_last(t) && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

template <bool kWide>
struct ImplicitShape {
  int width_log2 = 0;
  int64_t tiles_x = 0, tiles_y = 0, column_blocks = 0;
  int64_t tiles(const DeformConvParams& p) const { return p.N * tiles_y * tiles_x; }
};

// The rectangle of the tile that needs the fewest tiles for an image. Of those the squarest, whose
// pixels share most of what they read; but a result with pixels fastest is stored in whole sectors
// only by rows of 16.
template <bool kWide>
ImplicitShape<kWide> implicit_shape(const DeformConvParams& p, bool channels_last) {
  using Tile = ImplicitTile<kWide>;
  ImplicitShape<kWide> best;
  const int preferred = channels_last ? 3 : 4;
  for (const int width_log2 : {preferred, 7 - preferred, 2, 5}) {
    ImplicitShape<kWide> shape;
    shape.width_log2 = width_log2;
    shape.tiles_x = div_up<int64_t>(p.OW, int64_t{1} << width_log2);
    shape.tiles_y = div_up<int64_t>(p.OH, Tile::kPixels >> width_log2);
    shape.column_blocks = div_up<int64_t>(p.K, Tile::kColumns);
    if (best.tiles_x == 0 || shape.tiles(p) < best.tiles(p)) best = shape;
  }
  return best;
}

bool applies(const DeformConvParams& p, const DeformConvArgs& args) {
  constexpr int64_t kMaxTaps = 36;
  constexpr int64_t kMaxVectors = int64_t{1} << 32;
  const ScalarType dtype = args.input.scalar_type();
  return (dtype == ScalarType::Half || dtype == ScalarType::BFloat16) && p.weight_groups == 1 &&
         p.group_channels() % kImplicitChunk == 0 && p.taps() <= kMaxTaps &&
         args.input.numel() / 8 < kMaxVectors && p.pixels() < std::numeric_limits<int32_t>::max() &&
         p.N < 65536 && p.C < 65536 * int64_t{kTransposeTile} && has_wgmma(kOp);
}

template <class T>
Tensor copy_channels_last(const Tensor& input, cudaStream_t stream) {
  const Tensor from = opzoo::contiguous(input);
  const Sizes sizes = sizes_of(input);
  Tensor to = empty_strided(sizes, channels_last_strides(sizes), input.scalar_type(), input);
  const int64_t pixels = sizes[2] * sizes[3];
  const dim3 grid(static_cast<unsigned>(div_up<int64_t>(pixels, kTransposeTile)),
                  static_cast<unsigned>(div_up<int64_t>(sizes[1], kTransposeTile)),
                  static_cast<unsigned>(sizes[0]));
  deform_conv2d_channels_last_kernel<T>
      <<<grid, 256, 0, stream>>>(data<T>(from), sizes[1], pixels, mutable_data<T>(to));
  check_launch(kOp);
  return to;
}

template <class T, bool kWide>
bool launch_implicit(const DeformConvParams& p,
                     const DeformConvArgs& args,
                     const OptionalTensor& bias,
                     Tensor& out,
                     cudaStream_t stream) {
  using Tile = ImplicitTile<kWide>;
  const auto kernel = deform_conv2d_implicit_kernel<T, kWide>;
  const int shared = static_cast<int>(implicit_shared_bytes<kWide>(p.taps()));
  int device = 0, most_shared = 0;
  check_cuda(cudaGetDevice(&device), kOp);
  check_cuda(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             kOp);
  if (shared > most_shared) return false;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
             kOp);

  const ImplicitShape<kWide> shape = implicit_shape<kWide>(p, is_channels_last(out));
  const int64_t columns = shape.column_blocks * Tile::kColumns;
  Tensor tiles = empty({columns, p.rows()}, args.weight.scalar_type(), args.weight);
  const int taps = static_cast<int>(p.taps());
  const dim3 weight_grid(static_cast<unsigned>(columns),
                         static_cast<unsigned>(p.C / kImplicitChunk));
  deform_conv2d_weight_tiles_kernel<T>
      <<<weight_grid, 128, kImplicitChunkBytes * taps, stream>>>(data<T>(args.weight),
                                                                 image_strides(args.weight),
                                                                 p.K,
                                                                 static_cast<int>(p.kernel_w),
                                                                 taps,
                                                                 Tile::kColumns,
                                                                 mutable_data<T>(tiles));
  check_launch(kOp);

  const Tensor input =
      has_channel_vectors(args.input) ? args.input : copy_channels_last<T>(args.input, stream);
  DeformConvImplicitParams params{};
  params.conv = p;
  params.conv.input = input.const_data_ptr();
  params.conv.input_strides = image_strides(input);
  params.weight_tiles = tiles.const_data_ptr();
  params.bias = bias ? bias->const_data_ptr() : nullptr;
  params.bias_stride = bias ? bias->stride(0) : 0;
  params.out = out.mutable_data_ptr();
  params.out_strides = image_strides(out);
  params.tile_width_log2 = shape.width_log2;
  params.tiles_x = shape.tiles_x;
  params.tiles_y = shape.tiles_y;
  const dim3 grid(static_cast<unsigned>(shape.tiles(p)),
                  static_cast<unsigned>(shape.column_blocks));
  kernel<<<grid, kImplicitThreads, shared, stream>>>(params);
  check_launch(kOp);
  return true;
}

}  // namespace

bool run_deform_conv2d_implicit(const DeformConvParams& p,
                                const DeformConvArgs& args,
                                const OptionalTensor& bias,
                                Tensor& out) {
  if (!applies(p, args)) return false;
  const cudaStream_t stream = current_stream(out);
  const bool wide = p.K > ImplicitTile<false>::kColumns;
  const auto launch = [&]<class T>() {
    return wide ? launch_implicit<T, true>(p, args, bias, out, stream)
                : launch_implicit<T, false>(p, args, bias, out, stream);
  };
  return args.input.scalar_type() == ScalarType::Half ? launch.template operator()<Half>()
                                                      : launch.template operator()<BFloat16>();
}

}  // namespace opzoo
