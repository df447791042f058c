// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "matmul/matmul_cuda_plan.h"
#include "matmul/matmul_pack.cuh"
#include "matmul/matmul_reduce.cuh"
#include "matmul/matmul_wgmma_kernel.cuh"

namespace opzoo {
namespace {

// How the output is cut: tiles of 128 x cols, `cluster` of them one below the other that share
// their slices of b, and K in `splits` ranges.
struct WgmmaCut {
  int cols = 256;
  int cluster = 1;
  int splits = 1;
};

// The cheapest cut by a model of the time, in units of one stage of a 128 x 256 tile (0.7 us for
// 16-bit types on an H200). A 128 x 128 tile costs a little more than half: it reads as much of a.
WgmmaCut choose_cut(
    int64_t M, int64_t N, int64_t items, int64_t k_blocks, int64_t sms, bool narrow) {
  WgmmaCut best;
  double best_time = 1e300;
  const int64_t rows = div_up<int64_t>(M, kWgmmaRows);
  for (const int cols : {256, 128}) {
    if (narrow && cols != 128) continue;
    for (const int cluster : {2, 1}) {
      if (cluster == 2 && rows == 1) continue;
      for (const int splits : {1, 2, 3, 4, 6, 8, 12, 16}) {
        if (splits > 1 && k_blocks / splits < 4) continue;
        const double units = static_cast<double>(div_up<int64_t>(rows, cluster)) *
                             static_cast<double>(div_up<int64_t>(N, cols)) *
                             static_cast<double>(items) * splits;
        const double waves = std::ceil(units / static_cast<double>(sms / cluster));
        const double stage = (cols == 256 ? 1.0 : 0.56) * (cluster == 1 ? 1.05 : 1.0);
        const double tile_end = cols == 256 ? 3.0 : 1.8;
        double time =
            waves * (static_cast<double>(div_up<int64_t>(k_blocks, splits)) * stage + tile_end);
        const double partial_bytes = 4.0 * static_cast<double>(M) * static_cast<double>(N) *
                                     static_cast<double>(items) * splits;
        if (splits > 1) time += 12 + partial_bytes * 2 / 2e6;
        if (splits > 1 && partial_bytes > 256e6) continue;
        if (time < best_time) {
          best_time = time;
          best = {cols, cluster, splits};
        }
      }
    }
  }
  return best;
}

// One operand for the copy engine: the caller's memory, or a packed copy of it.
struct WgmmaOperand {
  TmaTensor tensor{};
  bool along_lines = false;  // contiguous along m or n instead of k
  bool batched = false;
  Tensor packed;
};

struct OperandView {
  const void* data;
  MatmulOperand which;
  int64_t lines, line, depth;
};

CUtensorMapDataType tensor_map_type(ScalarType dtype) {
  if (dtype == ScalarType::Half) return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  if (dtype == ScalarType::BFloat16) return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

bool has_batch(const MatmulParams& p, MatmulOperand which) {
  for (int axis = 0; axis < p.batches.axes; ++axis) {
    if (p.batches.size[axis] > 1 && p.batches.stride[which][axis] != 0) return true;
  }
  return false;
}

// The caller's memory as it is, if the copy engine can address it: one axis contiguous, 16-byte
// strides, at most one batch axis.
bool view_directly(const MatmulPlan& plan, const OperandView& view, WgmmaOperand& operand) {
  const MatmulParams& p = plan.params;
  constexpr int64_t kMaxStride = int64_t{1} << 39;  // elements of 2 bytes: 2^40 bytes
  const auto usable = [](int64_t stride) {
    return stride > 0 && stride % 8 == 0 && stride < kMaxStride;
  };
  const bool batched = has_batch(p, view.which);
  const int64_t item = batched ? p.batches.stride[view.which][0] : 8;
  if (batched && p.batches.axes != 1) return false;
  if (reinterpret_cast<uintptr_t>(view.data) % 16 != 0 || !usable(item)) return false;
  const bool along_k = view.depth == 1 && usable(view.line);
  if (!along_k && !(view.line == 1 && usable(view.depth))) return false;
  const int64_t items = batched ? p.batches.numel : 1;
  operand.tensor = {
      tensor_map_type(plan.dtype), 2, view.data, {p.K, view.lines, items}, {view.line, item}};
  operand.batched = batched;
  operand.along_lines = !along_k;
  if (!along_k) {
    std::swap(operand.tensor.extent[0], operand.tensor.extent[1]);
    operand.tensor.stride[0] = view.depth;
  }
  return true;
}

// Whether a packed copy is worth its memory: not where it would be beyond 2^30 elements, nor where
// an expanded operand, which is small in memory, would be written out many times.
bool may_pack(const MatmulParams& p, const OperandView& view) {
  double copied = static_cast<double>(view.lines) * static_cast<double>(p.K);
  double stored = (view.line != 0 ? static_cast<double>(view.lines) : 1.0) *
                  (view.depth != 0 ? static_cast<double>(p.K) : 1.0);
  if (has_batch(p, view.which)) {
    for (int axis = 0; axis < p.batches.axes; ++axis) {
      const auto size = static_cast<double>(p.batches.size[axis]);
      copied *= size;
      if (p.batches.stride[view.which][axis] != 0) stored *= size;
    }
  }
  return copied <= 0x1p22 || (copied <= 0x1p30 && copied <= 4 * stored);
}

template <class T, int kParts>
void pack(const MatmulPlan& plan, const OperandView& view, WgmmaOperand& operand, int* too_large) {
  const MatmulParams& p = plan.params;
  MatmulPackParams q;
  q.source = view.data;
  q.lines = view.lines;
  q.terms = p.K;
  q.line = view.line;
  q.depth = view.depth;
  q.pitch = div_up<int64_t>(p.K, 16) * 16;
  q.batches = p.batches;
  q.operand = view.which;
  operand.batched = has_batch(p, view.which);
  q.items = operand.batched ? p.batches.numel : 1;
  operand.packed = empty({q.items * kParts * q.lines * q.pitch}, plan.dtype, plan.out);
  q.target = operand.packed.mutable_data_ptr();
  const int64_t tiles =
      div_up<int64_t>(q.lines, kPackTile) * div_up<int64_t>(q.terms, kPackTile) * q.items;
  matmul_pack_kernel<T, kParts>
      <<<grid_for(tiles, 1), kBlockSize, 0, current_stream(plan.out)>>>(q, too_large);
  check_launch("matmul");
  operand.tensor = {tensor_map_type(plan.dtype),
                    sizeof(T),
                    q.target,
                    {p.K, q.lines, q.items * kParts},
                    {q.pitch, q.lines * q.pitch}};
  operand.along_lines = false;
}

using WgmmaKernel = void (*)(CUtensorMap, CUtensorMap, CUtensorMap, WgmmaParams, const int*);

template <class T, int kCols>
WgmmaKernel kernel_for(bool along_m, bool along_n) {
  if (along_m) {
    return along_n ? matmul_wgmma_kernel<T, kCols, true, true, 1>
                   : matmul_wgmma_kernel<T, kCols, true, false, 1>;
  }
  return along_n ? matmul_wgmma_kernel<T, kCols, false, true, 1>
                 : matmul_wgmma_kernel<T, kCols, false, false, 1>;
}

template <class T, int kParts>
bool launch_wgmma(const MatmulPlan& plan, int sms) {
  using Storage = std::conditional_t<std::is_same_v<T, Tf32>, float, T>;
  constexpr bool kIsTf32 = std::is_same_v<T, Tf32>;
  const MatmulParams& p = plan.params;
  const cudaStream_t stream = current_stream(plan.out);
  const int64_t k_blocks = div_up<int64_t>(p.K * static_cast<int64_t>(sizeof(T)), kWgmmaRowBytes);
  const int64_t items = p.batches.numel;
  const WgmmaCut cut = choose_cut(p.M, p.N, items, k_blocks, sms, kParts == 2);
  const int64_t row_units = div_up<int64_t>(div_up<int64_t>(p.M, kWgmmaRows), cut.cluster);
  const int64_t col_tiles = div_up<int64_t>(p.N, cut.cols);
  if (static_cast<double>(row_units) * static_cast<double>(col_tiles) * cut.splits *
          static_cast<double>(items) >
      1e9) {
    return false;
  }

  Tensor flag;
  int* too_large = nullptr;
  if constexpr (kParts == 2) {
    flag = empty({1}, ScalarType::Int, plan.out);
    too_large = mutable_data<int>(flag);
    check_cuda(cudaMemsetAsync(too_large, 0, sizeof(int), stream), "matmul");
  }
  const OperandView views[2] = {{p.a, kMatmulA, p.M, p.a_row, p.a_col},
                                {p.b, kMatmulB, p.N, p.b_col, p.b_row}};
  WgmmaOperand operands[2];
  CUtensorMap maps[3] = {};
  for (int i = 0; i < 2; ++i) {
    const int lines_per_copy = i == 0 ? kWgmmaRows : cut.cols / cut.cluster;
    WgmmaOperand& operand = operands[i];
    bool mapped = false;
    if (!kIsTf32 && view_directly(plan, views[i], operand)) {
      const int rows = operand.along_lines ? 64 : lines_per_copy;
      mapped = make_tensor_map(maps[i], operand.tensor, rows) == 0;
    }
    if (!mapped) {
      if (!may_pack(p, views[i])) return false;
      pack<Storage, kParts>(plan, views[i], operand, too_large);
      if (make_tensor_map(maps[i], operand.tensor, lines_per_copy) != 0) return false;
    }
  }

  WgmmaParams q;
  q.M = static_cast<int>(p.M);
  q.N = static_cast<int>(p.N);
  q.k_blocks = static_cast<int>(k_blocks);
  q.k_blocks_per_split = static_cast<int>(div_up<int64_t>(k_blocks, cut.splits));
  q.splits = div_up(q.k_blocks, q.k_blocks_per_split);
  q.row_units = static_cast<int>(row_units);
  q.col_tiles = static_cast<int>(col_tiles);
  q.units = static_cast<int>(row_units * col_tiles * q.splits * items);
  q.a_batched = operands[0].batched;
  q.b_batched = operands[1].batched;
  q.out = p.out;
  Tensor partial;
  if (q.splits > 1) {
    q.partial_pitch = div_up<int64_t>(p.N, 8) * 8;
    partial = empty({items * q.splits * p.M * q.partial_pitch}, ScalarType::Float, plan.out);
    q.partial = mutable_data<float>(partial);
  } else if (p.N * static_cast<int64_t>(sizeof(Storage)) % 16 == 0) {
    const TmaTensor out = {
        tensor_map_type(plan.dtype), sizeof(Storage), p.out, {p.N, p.M, items}, {p.N, p.M * p.N}};
    q.store_by_tma = make_tensor_map(maps[2], out, 64) == 0;
  }

  WgmmaKernel kernel;
  if constexpr (kParts == 2) {
    kernel = matmul_wgmma_kernel<T, 128, false, false, 2>;
  } else if constexpr (kIsTf32) {
    kernel = cut.cols == 256 ? matmul_wgmma_kernel<T, 256, false, false, 1>
                             : matmul_wgmma_kernel<T, 128, false, false, 1>;
  } else {
    kernel = cut.cols == 256 ? kernel_for<T, 256>(operands[0].along_lines, operands[1].along_lines)
                             : kernel_for<T, 128>(operands[0].along_lines, operands[1].along_lines);
  }
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kWgmmaSharedBytes),
      "matmul");
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {static_cast<unsigned>(cut.cluster), 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = std::min(sms / cut.cluster, q.units) * cut.cluster;
  config.blockDim = kWgmmaThreads;
  config.dynamicSmemBytes = kWgmmaSharedBytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(
                 &config, kernel, maps[0], maps[1], maps[2], q, static_cast<const int*>(too_large)),
             "matmul");
  if (q.splits > 1) {
    matmul_reduce_kernel<Storage><<<matmul_reduce_grid(items * p.M, p.N), kBlockSize, 0, stream>>>(
        static_cast<Storage*>(p.out),
        q.partial,
        items,
        p.M,
        p.N,
        q.partial_pitch,
        q.splits,
        too_large);
    check_launch("matmul");
  }
  // With a NaN, inf or too large a number in an operand the kernels above did nothing; this does.
  if constexpr (kParts == 2) matmul_by_tiles(plan, too_large);
  return true;
}

}  // namespace

bool matmul_by_wgmma(const MatmulPlan& plan) {
  const MatmulParams& p = plan.params;
  constexpr int64_t kMaxExtent = int64_t{1} << 30;
  if (std::max({p.M, p.N, p.K, p.batches.numel}) > kMaxExtent) return false;
  if (!has_wgmma("matmul")) return false;
  int device = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), "matmul");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "matmul");
  if (plan.dtype == ScalarType::Half) return launch_wgmma<Half, 1>(plan, sms);
  if (plan.dtype == ScalarType::BFloat16) return launch_wgmma<BFloat16, 1>(plan, sms);
  if (plan.precision == MatmulPrecision::kTf32) return launch_wgmma<Tf32, 1>(plan, sms);
  return launch_wgmma<Tf32, 2>(plan, sms);
}

}  // namespace opzoo
