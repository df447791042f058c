// SPDX-License-Identifier: Apache-2.0
#include "nms/nms_kernel.cuh"
#include "nms/nms_plan.h"

namespace opzoo {
namespace {

// Indices of the boxes in score order.
Tensor score_order(const NmsPlan& plan, cudaStream_t stream) {
  const Tensor keys = empty({plan.n}, ScalarType::Long, plan.boxes);
  dispatch_all(plan.scores.scalar_type(), plan.op, [&]<class T>() {
    nms_key_kernel<T><<<grid_for(plan.n), kBlockSize, 0, stream>>>(
        plan.scores_view, plan.n, mutable_data<int64_t>(keys));
  });
  check_launch(plan.op);
  using torch::stable::detail::from;
  using torch::stable::detail::to;
  // sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False)
  std::array<StableIValue, 4> stack{
      from(keys), from(std::optional<bool>(true)), from(int64_t{0}), from(true)};
  OPZOO_TORCH_CALL(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  const auto sorted_keys = to<Tensor>(stack[0]);  // owned by the stack until taken
  return to<Tensor>(stack[1]);
}

template <class T, class acc = box_acc_t<T>>
void fill_mask(const NmsPlan& plan, const Tensor& order, const Tensor& mask, cudaStream_t stream) {
  const ScalarType dtype = sizeof(acc) == 8 ? ScalarType::Double : ScalarType::Float;
  const Tensor boxes = empty({plan.n, 4}, dtype, plan.boxes);
  auto* sorted_boxes = reinterpret_cast<Box<acc>*>(mutable_data<acc>(boxes));
  OptionalTensor classes;
  if (plan.classes) classes = empty({plan.n}, ScalarType::Long, plan.boxes);
  auto* sorted_classes = classes ? mutable_data<int64_t>(*classes) : nullptr;
  nms_gather_kernel<T><<<grid_for(plan.n), kBlockSize, 0, stream>>>(
      plan.boxes_view,
      plan.classes ? data<int64_t>(*plan.classes) : nullptr,
      plan.classes ? plan.classes->stride(0) : 0,
      data<int64_t>(order),
      plan.n,
      sorted_boxes,
      sorted_classes);
  check_launch(plan.op);

  const int64_t words = div_up<int64_t>(plan.n, kNmsTile);
  const unsigned grid = grid_for(words * (words + 1) / 2, 1);
  nms_mask_kernel<acc>
      <<<grid, kNmsTile, 0, stream>>>(sorted_boxes,
                                      sorted_classes,
                                      plan.n,
                                      static_cast<acc>(plan.iou_threshold),
                                      reinterpret_cast<NmsWord*>(mutable_data<int64_t>(mask)));
  check_launch(plan.op);
}

Tensor run_cuda(const NmsPlan& plan) {
  if (plan.n == 0) return empty({0}, ScalarType::Long, plan.boxes);
  const DeviceGuard guard(plan.boxes.get_device_index());
  const cudaStream_t stream = current_stream(plan.boxes);
  const int64_t words = div_up<int64_t>(plan.n, kNmsTile);
  const Tensor order = score_order(plan, stream);
  const Tensor mask = empty({plan.n, words}, ScalarType::Long, plan.boxes);
  dispatch_all(plan.boxes.scalar_type(), plan.op, [&]<class T>() {
    fill_mask<T>(plan, order, mask, stream);
  });

  OptionalTensor scratch;
  if (words > kNmsSharedWords) scratch = empty({words}, ScalarType::Long, plan.boxes);
  const size_t shared_bytes = scratch ? 0 : static_cast<size_t>(words) * sizeof(NmsWord);
  const Tensor indices = empty({plan.n}, ScalarType::Long, plan.boxes);
  const Tensor count = empty({1}, ScalarType::Long, plan.boxes);
  nms_reduce_kernel<<<1, kNmsReduceThreads, shared_bytes, stream>>>(
      reinterpret_cast<const NmsWord*>(data<int64_t>(mask)),
      data<int64_t>(order),
      plan.n,
      scratch ? reinterpret_cast<NmsWord*>(mutable_data<int64_t>(*scratch)) : nullptr,
      mutable_data<int64_t>(indices),
      mutable_data<int64_t>(count));
  check_launch(plan.op);

  // The size of the result is data: the host has to wait for it. The only wait, and 8 bytes.
  int64_t kept = 0;
  check_cuda(
      cudaMemcpyAsync(&kept, data<int64_t>(count), sizeof(kept), cudaMemcpyDeviceToHost, stream),
      plan.op);
  check_cuda(cudaStreamSynchronize(stream), plan.op);
  Tensor result = empty({kept}, ScalarType::Long, plan.boxes);
  check_cuda(cudaMemcpyAsync(mutable_data<int64_t>(result),
                             data<int64_t>(indices),
                             static_cast<size_t>(kept) * sizeof(int64_t),
                             cudaMemcpyDeviceToDevice,
                             stream),
             plan.op);
  return result;
}

Tensor nms_cuda(const Tensor& boxes,
                const Tensor& scores,
                double iou_threshold,
                std::optional<double> score_threshold,
                std::optional<int64_t> max_output) {
  return run_cuda(
      plan_nms("nms", boxes, scores, std::nullopt, iou_threshold, score_threshold, max_output));
}

Tensor batched_nms_cuda(const Tensor& boxes,
                        const Tensor& scores,
                        const Tensor& idxs,
                        double iou_threshold,
                        std::optional<double> score_threshold,
                        std::optional<int64_t> max_output) {
  return run_cuda(
      plan_nms("batched_nms", boxes, scores, idxs, iou_threshold, score_threshold, max_output));
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("nms", OPZOO_BOX(opzoo::nms_cuda));
  m.impl("batched_nms", OPZOO_BOX(opzoo::batched_nms_cuda));
}
