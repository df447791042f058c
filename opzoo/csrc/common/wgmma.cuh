// SPDX-License-Identifier: Apache-2.0
// Warpgroup matrix products of Hopper's tensor cores (PTX ISA, "wgmma"). sm_90a only. No torch.
//
// A warpgroup is 4 consecutive warps, the first of which has an index divisible by 4. Together they
// start D[64 x n] += A[64 x k] B[k x n], asynchronously: A and B lie in shared memory, where 64-bit
// descriptors say how, D in the registers of all 128 threads. k is 32 bytes of elements: 16 of a
// 16-bit type, 8 of tf32.
//
//   wgmma_fence()        before the first product that touches registers this thread wrote
//   wgmma_bf16(...)...   any number
//   wgmma_commit()       closes a group
//   wgmma_wait<n>()      all but the last n groups are done; only now may D be read and the shared
//                        memory of their operands be overwritten
//
// Thread t of the warpgroup, in warp w = t / 32 with lane l = t % 32, holds of D, for each block of
// 8 columns j: d[4j], d[4j + 1] = D[16w + l / 4][8j + 2 (l % 4) + {0, 1}] and d[4j + 2], d[4j + 3]
// the same columns 8 rows further down.
#pragma once

#include <cstdint>

#include "common/mbarrier.cuh"

namespace opzoo {

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// How an operand lies in shared memory: 128-byte rows swizzled as the copy engine does with
// CU_TENSOR_MAP_SWIZZLE_128B, 8 rows to a 1024-byte atom. All fields are in units of 16 bytes.
//   not transposed (k is contiguous): a row holds 128 bytes of k for one m (or n); the next 8 rows
//     follow 1024 bytes later. The next 32 bytes of k: add 32 to the address.
//   transposed (m or n is contiguous; 16-bit types only): a row holds 64 m (or n) of one k; the
//     next 8 k follow 1024 bytes later, the next 64 m (or n) `chunk_bytes` later. The next 16 k:
//     add 2048 to the address.
__device__ __forceinline__ uint64_t wgmma_operand(const void* shared, uint32_t chunk_bytes) {
  constexpr uint64_t kSwizzle128 = 1;
  const uint64_t address = (shared_address(shared) & 0x3ffff) >> 4;
  return address | static_cast<uint64_t>(chunk_bytes >> 4) << 16 |
         static_cast<uint64_t>(1024 >> 4) << 32 | kSwizzle128 << 62;
}

#define OPZOO_ACC_4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OPZOO_ACC_16(d, i) \
  OPZOO_ACC_4(d, i), OPZOO_ACC_4(d, i + 4), OPZOO_ACC_4(d, i + 8), OPZOO_ACC_4(d, i + 12)
#define OPZOO_ACC_64(d, i) \
  OPZOO_ACC_16(d, i), OPZOO_ACC_16(d, i + 16), OPZOO_ACC_16(d, i + 32), OPZOO_ACC_16(d, i + 48)

// d += A B where accumulate, else d = A B. The number of registers says n: 128 are 256 columns, 64
// are 128.
template <bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void wgmma_bf16(float (&d)[128],
                                              uint64_t a,
                                              uint64_t b,
                                              bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, %131, %132;\n"
      "}"
      : OPZOO_ACC_64(d, 0), OPZOO_ACC_64(d, 64)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kATransposed), "n"(kBTransposed));
}

template <bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void wgmma_bf16(float (&d)[64],
                                              uint64_t a,
                                              uint64_t b,
                                              bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, %67, %68;\n"
      "}"
      : OPZOO_ACC_64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kATransposed), "n"(kBTransposed));
}

template <bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void wgmma_f16(float (&d)[128],
                                              uint64_t a,
                                              uint64_t b,
                                              bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1, %131, %132;\n"
      "}"
      : OPZOO_ACC_64(d, 0), OPZOO_ACC_64(d, 64)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kATransposed), "n"(kBTransposed));
}

template <bool kATransposed, bool kBTransposed>
__device__ __forceinline__ void wgmma_f16(float (&d)[64],
                                              uint64_t a,
                                              uint64_t b,
                                              bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, %67, %68;\n"
      "}"
      : OPZOO_ACC_64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kATransposed), "n"(kBTransposed));
}

__device__ __forceinline__ void wgmma_tf32(float (&d)[128],
                                              uint64_t a,
                                              uint64_t b,
                                              bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %130, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      " %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      " %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      " %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      " %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, p, 1, 1;\n"
      "}"
      : OPZOO_ACC_64(d, 0), OPZOO_ACC_64(d, 64)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma_tf32(float (&d)[64],
                                              uint64_t a,
                                              uint64_t b,
                                              bool accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      " %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      " %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n"
      "}"
      : OPZOO_ACC_64(d, 0)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef OPZOO_ACC_4
#undef OPZOO_ACC_16
#undef OPZOO_ACC_64

// Stores four 8 x 8 matrices of 16-bit elements, held as the fragments above after conversion, to
// shared memory: lane l names the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(uint32_t address,
                                         uint32_t m0,
                                         uint32_t m1,
                                         uint32_t m2,
                                         uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(address), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}

}  // namespace opzoo
