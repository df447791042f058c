// SPDX-License-Identifier: Apache-2.0
#include "add/add_kernel.cuh"
#include "add/add_plan.h"

namespace opzoo {
namespace {

// Whether every row of the operand starts on a 16-byte boundary and runs with stride 1.
template <class T>
bool has_vector_rows(const StridedLoop<3>& loop, AddOperand operand, const void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0 || loop.stride[operand][0] != 1) return false;
  for (int axis = 1; axis < loop.axes; ++axis) {
    if (loop.stride[operand][axis] % kAddVector<T> != 0) return false;
  }
  return true;
}

template <class T>
AddAccess access_of(const StridedLoop<3>& loop, AddOperand operand, const void* data) {
  if (!data || loop.stride[operand][0] == 0) return AddAccess::kRepeated;
  return has_vector_rows<T>(loop, operand, data) ? AddAccess::kVectors : AddAccess::kElements;
}

template <class T>
void launch_add(const AddParams& p, cudaStream_t stream) {
  const StridedLoop<3>& loop = p.loop;
  const int64_t numel = loop.numel;
  const AddAccess a = access_of<T>(loop, kAddA, p.a.data);
  const AddAccess b = access_of<T>(loop, kAddB, p.b.data);
  const bool vectors = a == AddAccess::kVectors && b == AddAccess::kVectors;
  const bool vector_rows = has_vector_rows<T>(loop, kAddOut, p.out);
  const unsigned vector_grid = grid_for(div_up<int64_t>(numel, kAddVector<T>));
  if (vectors && vector_rows && loop.is_contiguous()) {
    add_contiguous_kernel<T>
        <<<vector_grid, kBlockSize, 0, stream>>>(static_cast<const T*>(p.a.data),
                                                 static_cast<const T*>(p.b.data),
                                                 static_cast<T*>(p.out),
                                                 static_cast<acc_t<T>>(p.alpha),
                                                 numel);
  } else if (vector_rows && loop.size[0] % kAddVector<T> == 0) {
    const AddRows rows{p, a, b, loop.size[0] / kAddVector<T>};
    if (loop.fits_32_bits()) {
      add_rows_kernel<T, int32_t><<<vector_grid, kBlockSize, 0, stream>>>(rows);
    } else {
      add_rows_kernel<T, int64_t><<<vector_grid, kBlockSize, 0, stream>>>(rows);
    }
  } else if (loop.fits_32_bits()) {
    add_strided_kernel<T, int32_t><<<grid_for(numel), kBlockSize, 0, stream>>>(p);
  } else {
    add_strided_kernel<T, int64_t><<<grid_for(numel), kBlockSize, 0, stream>>>(p);
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
