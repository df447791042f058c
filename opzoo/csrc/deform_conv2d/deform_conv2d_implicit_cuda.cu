// SPDX-License-Identifier: Apache-2.0
#include "deform_conv2d/deform_conv2d_implicit_kernel.cuh"
#include "deform_conv2d/deform_conv2d_implicit_layout.cuh"
#include "deform_conv2d/deform_conv2d_implicit_mma_kernel.cuh"
#include "deform_conv2d/deform_conv2d_implicit_plan.h"

namespace opzoo {
namespace {

constexpr const char* kOp = "deform_conv2d";
// Of a channels-last copy of input, which is made for a few images at a time.
constexpr int64_t kCopyBytes = int64_t{32} << 20;

int multiprocessors() {
  int device = 0, count = 0;
  check_cuda(cudaGetDevice(&device), kOp);
  check_cuda(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), kOp);
  return count;
}

// Dense with channels fastest, rows of whole 16-byte vectors on their boundaries.
bool has_channel_vectors(const Tensor& t) {
  return is_channels_last(t) && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

// How a result is dealt to blocks.
struct ImplicitGrid {
  int width_log2 = 0;
  int64_t tiles_x = 0, tiles_y = 0, tiles = 0, column_blocks = 0;
  int splits = 1;
  double cost = 0;  // steps of the busiest multiprocessor
};

template <class Tile>
void set_cost(const DeformConvParams& p, int sms, ImplicitGrid& grid) {
  const int64_t chunks = p.C / Tile::kChunk;
  grid.column_blocks = div_up<int64_t>(p.K, Tile::kColumns);
  const int64_t blocks = grid.tiles * grid.column_blocks;
  while (grid.splits < Tile::kMostSplits && blocks * grid.splits * 2 <= sms &&
         grid.splits * 2 <= chunks) {
    grid.splits *= 2;
  }
  const int64_t rounds = div_up<int64_t>(blocks * grid.splits, sms);
  grid.cost = static_cast<double>(rounds * div_up<int64_t>(chunks, grid.splits));
}

// Rectangles, whose pixels share most of what they read, the squarest of those that need the fewest
// tiles; but a result with pixels fastest is stored in whole sectors only by rows of 16. Runs of
// pixels waste nothing at the edges: where that saves a round of blocks they are taken.
template <class Tile>
ImplicitGrid implicit_grid(const DeformConvParams& p, bool channels_last, int sms) {
  ImplicitGrid best;
  const int preferred = channels_last ? 3 : 4;
  for (const int width_log2 : {preferred, 7 - preferred, 2, 5}) {
    ImplicitGrid grid;
    grid.width_log2 = width_log2;
    grid.tiles_x = div_up<int64_t>(p.OW, int64_t{1} << width_log2);
    grid.tiles_y = div_up<int64_t>(p.OH, Tile::kPixels >> width_log2);
    grid.tiles = p.N * grid.tiles_y * grid.tiles_x;
    set_cost<Tile>(p, sms, grid);
    if (best.tiles == 0 || grid.tiles < best.tiles) best = grid;
  }
  ImplicitGrid run;
  run.width_log2 = -1;
  run.tiles = div_up<int64_t>(p.pixels(), Tile::kPixels);
  set_cost<Tile>(p, sms, run);
  return run.cost < best.cost ? run : best;
}

bool applies(const DeformConvParams& p, const DeformConvArgs& args) {
  constexpr int64_t kMaxTaps = 36;
  constexpr int64_t kMaxVectors = int64_t{1} << 32;
  const ScalarType dtype = args.input.scalar_type();
  if (dtype == ScalarType::Double) return false;
  const int64_t element = args.input.element_size();
  return p.weight_groups == 1 && p.group_channels() % (kImplicitRowBytes / element) == 0 &&
         p.taps() <= kMaxTaps && args.input.numel() * element / 16 < kMaxVectors &&
         p.pixels() < std::numeric_limits<int32_t>::max() / 8 && p.N < 65536 &&
         p.C < 65536 * int64_t{32};
}

template <class Tile>
constexpr bool kIsPortable = std::is_same_v<Tile, PortableTile<typename Tile::T>>;

template <class Tile>
auto kernel_of() {
  if constexpr (kIsPortable<Tile>) {
    return deform_conv2d_implicit_mma_kernel<Tile>;
  } else {
    return deform_conv2d_implicit_kernel<Tile>;
  }
}

// Whether this GPU has the shared memory, and the code it will run the instructions.
template <class Tile>
bool can_launch(const DeformConvParams& p) {
  const size_t shared = Tile::shared_bytes(p.taps());
  int device = 0, most_shared = 0;
  check_cuda(cudaGetDevice(&device), kOp);
  check_cuda(cudaDeviceGetAttribute(&most_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
             kOp);
  if (shared > static_cast<size_t>(most_shared)) return false;
  cudaFuncAttributes attributes;
  check_cuda(cudaFuncGetAttributes(&attributes, kernel_of<Tile>()), kOp);
  if (kIsPortable<Tile> && attributes.ptxVersion < 80) return false;
  check_cuda(
      cudaFuncSetAttribute(
          kernel_of<Tile>(), cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared)),
      kOp);
  return true;
}

int64_t float_bytes(FloatKind kind) {
  return kind == FloatKind::kFloat64 ? 8 : kind == FloatKind::kFloat32 ? 4 : 2;
}

// The same call for images [first, first + count); the caller replaces input and out.
DeformConvParams images_of(DeformConvParams p, int64_t first, int64_t count) {
  p.N = count;
  for (FloatImage* image : {&p.offset, &p.mask}) {
    if (image->data == nullptr) continue;
    image->data =
        static_cast<char*>(image->data) + first * image->strides.n * float_bytes(image->kind);
  }
  return p;
}

template <class Tile>
void launch_tiles(DeformConvImplicitParams params, bool channels_last, cudaStream_t stream) {
  const DeformConvParams& p = params.conv;
  const int sms = multiprocessors();
  const ImplicitGrid grid = implicit_grid<Tile>(p, channels_last, sms);
  params.tile_width_log2 = grid.width_log2;
  params.tiles_x = grid.tiles_x;
  params.tiles_y = grid.tiles_y;
  params.splits = grid.splits;
  const int cluster = grid.splits > 1 ? grid.splits : 1;
  int64_t blocks = grid.tiles * grid.splits;
  if (Tile::kManyTiles && grid.splits == 1) {
    blocks = std::clamp<int64_t>(sms / grid.column_blocks, 1, blocks);
  }
  params.tiles = static_cast<uint32_t>(grid.tiles);
  // GPUs before Hopper know neither clusters nor a kernel that starts before the last has ended.
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(grid.column_blocks));
  config.blockDim = Tile::kThreads;
  config.dynamicSmemBytes = Tile::shared_bytes(p.taps());
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = kIsPortable<Tile> ? 0 : 2;
  check_cuda(cudaLaunchKernelEx(&config, kernel_of<Tile>(), params), kOp);
}

// Both operands as Tile reads them: the weight, where q.tiles is still to be written, and `images`
// contiguous images, where there are any.
template <class Tile>
void prepare(const DeformConvParams& p,
             int64_t images,
             bool with_weight,
             DeformConvPrepareParams q,
             cudaStream_t stream) {
  using T = typename Tile::T;
  constexpr int64_t kTile = kImplicitRowBytes / sizeof(T);
  if (with_weight) q.weight_blocks = div_up<int64_t>(q.units, prepare_units(q.taps));
  q.pixels = p.H * p.W;
  q.pixel_tiles = div_up<int64_t>(q.pixels, kTile);
  q.channel_tiles = div_up<int64_t>(p.C, kTile);
  const int64_t blocks = q.weight_blocks + images * q.pixel_tiles * q.channel_tiles;
  deform_conv2d_prepare_kernel<T, Tile::kParts>
      <<<static_cast<unsigned>(blocks), kPrepareThreads, prepare_shared_bytes(q.taps), stream>>>(q);
  check_launch(kOp);
}

template <class Tile>
DeformConvPrepareParams prepare_params(const DeformConvParams& p, const Tensor& weight) {
  DeformConvPrepareParams q{};
  q.weight = weight.const_data_ptr();
  q.weight_strides = image_strides(weight);
  q.K = p.K;
  q.C = p.C;
  q.kernel_w = static_cast<int>(p.kernel_w);
  q.taps = static_cast<int>(p.taps());
  q.columns = Tile::kColumns;
  q.units = div_up<int64_t>(p.K, Tile::kColumns) * Tile::kColumns * (p.C / Tile::kChunk);
  return q;
}

DeformConvImplicitParams implicit_params(const DeformConvParams& p,
                                         const Tensor& weight,
                                         const OptionalTensor& bias,
                                         Tensor& out) {
  DeformConvImplicitParams params{};
  params.conv = p;
  params.weight = weight.const_data_ptr();
  params.weight_strides = image_strides(weight);
  params.bias = bias ? bias->const_data_ptr() : nullptr;
  params.bias_stride = bias ? bias->stride(0) : 0;
  params.out = out.mutable_data_ptr();
  params.out_strides = image_strides(out);
  return params;
}

// Copies a few images at a time to channels-last and multiplies these.
template <class Tile>
void launch_by_copies(DeformConvImplicitParams params,
                      DeformConvPrepareParams q,
                      const Tensor& images,
                      bool channels_last,
                      cudaStream_t stream) {
  using T = typename Tile::T;
  const DeformConvParams p = params.conv;
  const Tensor input = opzoo::contiguous(images);
  T* out = static_cast<T*>(params.out);
  const int64_t image = p.C * p.H * p.W;
  const int64_t most =
      std::clamp<int64_t>(kCopyBytes / (image * static_cast<int64_t>(sizeof(T))), 1, p.N);
  const int64_t step = div_up<int64_t>(p.N, div_up<int64_t>(p.N, most));
  const Sizes sizes{step, p.C, p.H, p.W};
  Tensor copy = empty_strided(sizes, channels_last_strides(sizes), input.scalar_type(), input);
  for (int64_t first = 0; first < p.N; first += step) {
    params.conv = images_of(p, first, std::min(step, p.N - first));
    q.from = data<T>(input) + first * image;
    q.to = copy.mutable_data_ptr();
    prepare<Tile>(p, params.conv.N, first == 0, q, stream);
    params.conv.input = copy.const_data_ptr();
    params.conv.input_strides = image_strides(copy);
    params.out = out + first * params.out_strides.n;
    launch_tiles<Tile>(params, channels_last, stream);
  }
}

template <class Tile>
bool launch_implicit(const DeformConvParams& p,
                     const DeformConvArgs& args,
                     const OptionalTensor& bias,
                     Tensor& out) {
  const cudaStream_t stream = current_stream(out);
  if (!can_launch<Tile>(p)) return false;
  DeformConvPrepareParams q = prepare_params<Tile>(p, args.weight);
  DeformConvImplicitParams params = implicit_params(p, args.weight, bias, out);
  Tensor tiles = empty(
      {Tile::kParts, q.units, Tile::kChunk * p.taps()}, args.weight.scalar_type(), args.weight);
  q.tiles = tiles.mutable_data_ptr();
  params.weight_tiles = q.tiles;
  Tensor flag;
  if constexpr (Tile::kParts == 2) {
    flag = empty({1}, ScalarType::Int, out);
    q.too_large = mutable_data<int>(flag);
    params.weight_too_large = q.too_large;
    check_cuda(cudaMemsetAsync(q.too_large, 0, sizeof(int), stream), kOp);
  }
  const bool channels_last = is_channels_last(out);
  if (has_channel_vectors(args.input)) {
    prepare<Tile>(p, 0, true, q, stream);
    launch_tiles<Tile>(params, channels_last, stream);
  } else {
    launch_by_copies<Tile>(params, q, args.input, channels_last, stream);
  }
  return true;
}

// The two shapes of tiles on Hopper: nothing is sampled twice.
template <class T, int kParts>
bool launch_wgmma(const DeformConvParams& p,
                  const DeformConvArgs& args,
                  const OptionalTensor& bias,
                  Tensor& out) {
  using Narrow = ImplicitTile<T, kParts, false>;
  using Wide = ImplicitTile<T, kParts, true>;
  return (p.K <= Narrow::kColumns && launch_implicit<Narrow>(p, args, bias, out)) ||
         launch_implicit<Wide>(p, args, bias, out);
}

template <class T>
bool launch_16_bit(const DeformConvParams& p,
                   const DeformConvArgs& args,
                   const OptionalTensor& bias,
                   Tensor& out) {
  const bool wgmma = args.method == DeformConvMethod::kBest && has_wgmma(kOp);
  return (wgmma && launch_wgmma<T, 1>(p, args, bias, out)) ||
         launch_implicit<PortableTile<T>>(p, args, bias, out);
}

}  // namespace

bool run_deform_conv2d_implicit(const DeformConvParams& p,
                                const DeformConvArgs& args,
                                const OptionalTensor& bias,
                                Tensor& out) {
  if (!applies(p, args)) return false;
  switch (args.input.scalar_type()) {
    case ScalarType::Half:
      return launch_16_bit<Half>(p, args, bias, out);
    case ScalarType::BFloat16:
      return launch_16_bit<BFloat16>(p, args, bias, out);
    default:
      if (args.method != DeformConvMethod::kBest || !has_wgmma(kOp)) return false;
      return args.precision == DeformConvPrecision::kTf32
                 ? launch_wgmma<float, 1>(p, args, bias, out)
                 : launch_wgmma<float, 2>(p, args, bias, out);
  }
}

}  // namespace opzoo
