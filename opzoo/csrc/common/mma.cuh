// SPDX-License-Identifier: Apache-2.0
// Matrix products of one warp and copies to shared memory that do not pass through registers (PTX
// ISA, "mma", "ldmatrix" and "cp.async"). sm_80 and newer. No torch.
//
// mma_16x8x16 computes D[16 x 8] += A[16 x 16] B[16 x 8] of a 16-bit type. Lane l, with g = l / 4
// and q = l % 4, holds
//   a[0] = A[g][2q, 2q + 1]   a[1] = A[g + 8][same]   a[2], a[3] = the same rows, 8 columns on
//   b[0] = B[2q, 2q + 1][g]   b[1] = 8 rows on
//   d[0], d[1] = D[g][2q, 2q + 1]   d[2], d[3] = D[g + 8][same]
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/types.h"

namespace opzoo {

template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4],
                                            const uint32_t (&a)[4],
                                            uint32_t b0,
                                            uint32_t b1) {
  if constexpr (std::is_same_v<T, Half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four 8 x 8 matrices of 16-bit elements: lane l names the address of row l % 8 of matrix l / 8 and
// receives of each matrix m row l / 4, columns 2 (l % 4) + {0, 1} in m[...].
__device__ __forceinline__ void ldmatrix(uint32_t (&m)[4], const void* shared) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// 16 bytes, both addresses multiples of 16. cp_async_wait: all copies that this thread started are
// there; a barrier makes them visible to the others.
__device__ __forceinline__ void cp_async(void* shared, const void* from) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(address), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_all;" : : : "memory");
}

}  // namespace opzoo
