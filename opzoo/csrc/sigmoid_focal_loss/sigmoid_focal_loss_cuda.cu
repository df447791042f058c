// SPDX-License-Identifier: Apache-2.0
#include "sigmoid_focal_loss/sigmoid_focal_loss_kernel.cuh"
#include "sigmoid_focal_loss/sigmoid_focal_loss_plan.h"

namespace opzoo {
namespace {

bool on_vector_boundary(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Whether inputs, targets and grad lie element by element, or row by row, as the result does.
bool is_dense(const SigmoidFocalLossParams& p) {
  if (!on_vector_boundary(p.inputs) || !on_vector_boundary(p.grad)) return false;
  if (p.classes == 0 && !on_vector_boundary(p.targets)) return false;
  const auto walks_as_out = [&](FocalLossOperand operand) {
    for (int axis = 0; axis < p.loop.axes; ++axis) {
      if (p.loop.stride[operand][axis] != p.loop.stride[kFocalOut][axis]) return false;
    }
    return true;
  };
  if (!walks_as_out(kFocalInputs) || (p.grad && !walks_as_out(kFocalGrad))) return false;
  if (p.classes == 0) return walks_as_out(kFocalTargets);
  // Ids without gaps: the classes are the innermost axis, then one id per row.
  if (p.loop.axes == 1) return p.loop.stride[kFocalTargets][0] == (p.classes == 1 ? 1 : 0);
  return p.loop.axes == 2 && p.loop.size[0] == p.classes && p.loop.stride[kFocalTargets][0] == 0 &&
         p.loop.stride[kFocalTargets][1] == 1;
}

template <class T>
void launch(const SigmoidFocalLossParams& p, cudaStream_t stream) {
  if (is_dense(p)) {
    const unsigned grid = grid_for(div_up<int64_t>(p.loop.numel, kFocalVector<T>));
    const auto kernel =
        p.grad
            ? (p.classes ? focal_dense_kernel<T, true, true> : focal_dense_kernel<T, true, false>)
            : (p.classes ? focal_dense_kernel<T, false, true>
                         : focal_dense_kernel<T, false, false>);
    kernel<<<grid, kBlockSize, 0, stream>>>(p);
  } else if (p.loop.fits_32_bits()) {
    focal_strided_kernel<T, int32_t><<<grid_for(p.loop.numel), kBlockSize, 0, stream>>>(p);
  } else {
    focal_strided_kernel<T, int64_t><<<grid_for(p.loop.numel), kBlockSize, 0, stream>>>(p);
  }
}

Tensor run(const SigmoidFocalLossPlan& plan) {
  if (plan.params.loop.numel == 0) return plan.out;
  const cudaStream_t stream = current_stream(plan.out);
  dispatch_floating(plan.out.scalar_type(), "sigmoid_focal_loss", [&]<class T>() {
    launch<T>(plan.params, stream);
  });
  check_launch("sigmoid_focal_loss");
  return plan.out;
}

Tensor forward_cuda(const Tensor& inputs, const Tensor& targets, double alpha, double gamma) {
  const DeviceGuard guard(inputs.get_device_index());
  return run(plan_sigmoid_focal_loss(inputs, targets, alpha, gamma));
}

Tensor backward_cuda(
    const Tensor& grad, const Tensor& inputs, const Tensor& targets, double alpha, double gamma) {
  const DeviceGuard guard(inputs.get_device_index());
  return run(plan_sigmoid_focal_loss_backward(grad, inputs, targets, alpha, gamma));
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("sigmoid_focal_loss", OPZOO_BOX(opzoo::forward_cuda));
  m.impl("_sigmoid_focal_loss_backward", OPZOO_BOX(opzoo::backward_cuda));
}
