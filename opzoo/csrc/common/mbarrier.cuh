// SPDX-License-Identifier: Apache-2.0
// Barriers in shared memory that count arrivals and bytes, and barriers of clusters and of parts of
// a block (PTX ISA, "mbarrier" and "barrier"). sm_90. No torch.
//
// An mbarrier is in one phase at a time, numbered 0, 1, 2...; a phase completes when as many
// threads have arrived as it was initialised with and as many bytes have landed as were announced.
// Whoever waits names the parity of the phase that must be over. Right after initialisation the
// phase before the first one, of parity 1, counts as over.
#pragma once

#include <cstdint>

namespace opzoo {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster. A
// block or cluster barrier must follow before anyone uses them.
__device__ __forceinline__ void mbarrier_fence_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];"
               :
               : "r"(shared_address(barrier))
               : "memory");
}

// Arrives on the barrier that lies at the same address in block `rank` of the cluster. Says no more
// than that this block is done reading: with .release.cluster, which would also publish its
// ordinary writes, the compiler puts a fence of the whole GPU in front, a third of a matrix
// product's time.
__device__ __forceinline__ void mbarrier_arrive_remote(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}"
      :
      : "r"(shared_address(barrier)), "r"(rank)
      : "memory");
}

// Arrives and announces that `bytes` will be delivered by the copy engine within this phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Returns once the phase of this parity is over. try_wait sleeps in hardware for a while before it
// answers false, so the loop hardly costs issue slots.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}"
      :
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

// A barrier of `threads` threads of the block; id 0 belongs to __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Every thread of every block of the cluster.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;"
      :
      :
      : "memory");
}

// What lies at the same shared address in block `rank` of the cluster.
__device__ __forceinline__ float cluster_load(const float* pointer, uint32_t rank) {
  float value;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n"
      "}"
      : "=f"(value)
      : "r"(shared_address(pointer)), "r"(rank)
      : "memory");
  return value;
}
__device__ __forceinline__ float4 cluster_load(const float4* pointer, uint32_t rank) {
  float4 value;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %4, %5;\n"
      "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n"
      "}"
      : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
      : "r"(shared_address(pointer)), "r"(rank)
      : "memory");
  return value;
}

// In a kernel launched with programmatic stream serialization: what the kernel before it wrote is
// there from here on.
__device__ __forceinline__ void wait_for_last_kernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Moves registers from warpgroups that need few to those that need many. All warps of the
// warpgroup must execute it; takes effect in kernels with __launch_bounds__(threads, 1).
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kRegisters));
}

}  // namespace opzoo
