// SPDX-License-Identifier: Apache-2.0
// The tensor memory accelerator: boxes of a strided tensor of up to 3 axes, copied between device
// and shared memory by one thread's instruction (PTX ISA, "cp.async.bulk.tensor"). sm_90. No torch,
// and no link against libcuda: the one driver function needed is asked of the runtime.
//
// Elements outside the tensor are read as zeros and not written. Base and outer strides must be
// multiples of 16 bytes, extents fit 32 bits. A box has 128-byte rows; they are stored densely
// and swizzled: bits 4..6 of an offset in shared memory are xored with bits 7..9, so that the 8
// 16-byte pieces of one column lie in 8 different groups of banks. Shared memory of a box must be
// aligned to 1024 bytes.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/mbarrier.cuh"

namespace opzoo {

struct TmaTensor {
  CUtensorMapDataType type;
  int element_bytes;
  const void* base;
  int64_t extent[3];  // innermost first; the innermost stride is 1
  int64_t stride[2];  // of axes 1 and 2, in elements
};

// 0 on success. `rows` is the box's extent along axis 1; along axis 0 it has 128 bytes.
inline int make_tensor_map(CUtensorMap& map, const TmaTensor& t, int rows) {
  using Encode = CUresult (*)(CUtensorMap*,
                              CUtensorMapDataType,
                              cuuint32_t,
                              void*,
                              const cuuint64_t*,
                              const cuuint64_t*,
                              const cuuint32_t*,
                              const cuuint32_t*,
                              CUtensorMapInterleave,
                              CUtensorMapSwizzle,
                              CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill);
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
    return reinterpret_cast<Encode>(usable ? function : nullptr);
  }();
  if (encode == nullptr) return -1;
  const cuuint64_t extent[3] = {static_cast<cuuint64_t>(t.extent[0]),
                                static_cast<cuuint64_t>(t.extent[1]),
                                static_cast<cuuint64_t>(t.extent[2])};
  const cuuint64_t stride[2] = {static_cast<cuuint64_t>(t.stride[0] * t.element_bytes),
                                static_cast<cuuint64_t>(t.stride[1] * t.element_bytes)};
  const cuuint32_t box[3] = {
      static_cast<cuuint32_t>(128 / t.element_bytes), static_cast<cuuint32_t>(rows), 1};
  const cuuint32_t every[3] = {1, 1, 1};
  return encode(&map,
                t.type,
                3,
                const_cast<void*>(t.base),
                extent,
                stride,
                box,
                every,
                CU_TENSOR_MAP_INTERLEAVE_NONE,
                CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// Starts a copy of the box whose first element has coordinates (x, y, z) to shared memory; its
// bytes count towards the current phase of `barrier`.
__device__ __forceinline__ void tma_load(
    void* shared, const CUtensorMap& map, uint64_t* barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%3, %4, %5}], [%2];"
      :
      : "r"(shared_address(shared)), "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// The same box to every block of the cluster whose bit is set in `blocks`, to the same address in
// each and counted by each one's own barrier: one read of L2 for all.
__device__ __forceinline__ void tma_load_multicast(
    void* shared, const CUtensorMap& map, uint64_t* barrier, uint16_t blocks, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;"
      :
      : "r"(shared_address(shared)),
        "l"(&map),
        "r"(shared_address(barrier)),
        "r"(x),
        "r"(y),
        "r"(z),
        "h"(blocks)
      : "memory");
}

// Starts a copy of `bytes` consecutive bytes, a multiple of 16 like both addresses, to shared
// memory; no map is needed.
__device__ __forceinline__ void bulk_load(void* shared,
                                          const void* from,
                                          uint32_t bytes,
                                          uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      :
      : "r"(shared_address(shared)), "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Starts a copy from shared memory. The writers of that memory must each have executed
// fence_async_proxy() before a barrier that this thread has passed.
__device__ __forceinline__ void tma_store(
    const CUtensorMap& map, const void* shared, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4}], [%1];\n"
      "cp.async.bulk.commit_group;"
      :
      : "l"(&map), "r"(shared_address(shared)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Waits until at most kPending of this thread's stores have still to read their shared memory.
template <int kPending>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(kPending) : "memory");
}

// Orders this thread's ordinary writes to shared memory before later accesses by the copy engine
// and by wgmma.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace opzoo
