// SPDX-License-Identifier: Apache-2.0
#include "add/add_kernel.cuh"
#include "add/add_plan.h"

namespace opzoo {
namespace {

bool on_vector_boundary(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

template <class T>
AddAccess access_of(const StridedLoop<3>& loop, AddOperand operand, const void* data) {
  if (!data || loop.stride[operand][0] == 0) return AddAccess::kRepeated;
  bool vectors = on_vector_boundary(data) && loop.stride[operand][0] == 1 &&
                 (loop.axes == 1 || loop.size[0] % kAddVector<T> == 0);
  for (int axis = 1; axis < loop.axes; ++axis) {
    vectors = vectors && loop.stride[operand][axis] % kAddVector<T> == 0;
  }
  return vectors ? AddAccess::kVectors : AddAccess::kElements;
}

template <class T>
void launch_add(const AddParams& p, cudaStream_t stream) {
  const int64_t numel = p.loop.numel;
  const AddAccesses access{access_of<T>(p.loop, kAddA, p.a.data),
                           access_of<T>(p.loop, kAddB, p.b.data)};
  const unsigned grid = grid_for(div_up<int64_t>(numel, kAddVector<T>));
  if (p.loop.is_contiguous() && access.a == AddAccess::kVectors &&
      access.b == AddAccess::kVectors) {
    add_contiguous_kernel<T><<<grid, kBlockSize, 0, stream>>>(static_cast<const T*>(p.a.data),
                                                              static_cast<const T*>(p.b.data),
                                                              static_cast<T*>(p.out),
                                                              static_cast<acc_t<T>>(p.alpha),
                                                              numel);
  } else if (p.loop.fits_32_bits()) {
    add_strided_kernel<T, int32_t><<<grid, kBlockSize, 0, stream>>>(p, access);
  } else {
    add_strided_kernel<T, int64_t><<<grid, kBlockSize, 0, stream>>>(p, access);
  }
}

Tensor add_cuda(const Tensor& a, const Tensor& b, double alpha) {
  const DeviceGuard guard((a.is_cuda() ? a : b).get_device_index());
  const AddPlan plan = plan_add(a, b, alpha);
  if (plan.params.loop.numel == 0) return plan.out;
  const cudaStream_t stream = current_stream(plan.out);
  dispatch_all(plan.dtype, "add", [&]<class T>() { launch_add<T>(plan.params, stream); });
  check_launch("add");
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("add", OPZOO_BOX(opzoo::add_cuda));
}
