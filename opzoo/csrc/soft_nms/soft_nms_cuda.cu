// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "soft_nms/soft_nms_kernel.cuh"
#include "soft_nms/soft_nms_plan.h"

namespace opzoo {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;
using Result = std::tuple<Tensor, Tensor>;

struct Sorted {
  Tensor values, order;
};

Sorted sort_stable(const Tensor& t, bool descending) {
  // sort.stable(Tensor self, *, bool? stable, int dim=-1, bool descending=False)
  std::array<StableIValue, 4> stack{
      from(t), from(std::optional<bool>(true)), from(int64_t{0}), from(descending)};
  OPZOO_TORCH_CALL(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  return {to<Tensor>(stack[0]), to<Tensor>(stack[1])};
}

// The boxes and scores by position, in the type of the arithmetic.
template <class acc>
struct Gathered {
  Tensor boxes, scores;

  SoftNmsBoxes<acc> view(int64_t n) const {
    return {reinterpret_cast<const Box<acc>*>(data<acc>(boxes)),
            mutable_data<acc>(scores),
            static_cast<int>(n)};
  }
};

template <class acc>
Gathered<acc> gather(const SoftNmsPlan& plan, const int64_t* order, cudaStream_t stream) {
  Gathered<acc> gathered{empty({plan.n, 4}, plan.arithmetic, plan.boxes),
                         empty({plan.n}, plan.arithmetic, plan.boxes)};
  dispatch_all(plan.boxes.scalar_type(), plan.op, [&]<class T>() {
    soft_nms_boxes_kernel<T, acc><<<grid_for(plan.n), kBlockSize, 0, stream>>>(
        plan.input, order, plan.n, reinterpret_cast<Box<acc>*>(mutable_data<acc>(gathered.boxes)));
  });
  check_launch(plan.op);
  dispatch_all(plan.scores.scalar_type(), plan.op, [&]<class T>() {
    soft_nms_scores_kernel<T, acc><<<grid_for(plan.n), kBlockSize, 0, stream>>>(
        plan.input, order, plan.n, plan.rule<acc>().min_score, mutable_data<acc>(gathered.scores));
  });
  check_launch(plan.op);
  return gathered;
}

// Blocks of a cooperative grid for n boxes, one to a multiprocessor at most.
int cooperative_blocks(const SoftNmsPlan& plan, const void* kernel, size_t shared, int64_t wanted) {
  int device = 0, processors = 0, resident = 0;
  check_cuda(cudaGetDevice(&device), plan.op);
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), plan.op);
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kSoftNmsThreads, shared),
      plan.op);
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, resident > 0 ? processors : 1));
}

template <class acc>
Tensor room_for_keys(const SoftNmsPlan& plan, int blocks) {
  const int64_t keys = int64_t{2} * blocks * kSoftNmsWarps * kSoftNmsKeys;
  const auto bytes = static_cast<int64_t>(keys * sizeof(SoftNmsKey<acc>));
  return empty({bytes}, ScalarType::Byte, plan.boxes);
}

// Raises the limit of shared memory: fp64 asks for more than the 48 KB that are free to use.
template <class acc>
size_t shared_bytes(const SoftNmsPlan& plan, const void* kernel) {
  constexpr size_t kBytes = sizeof(SoftNmsShared<acc>);
  check_cuda(cudaFuncSetAttribute(
                 kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(kBytes)),
             plan.op);
  return kBytes;
}

template <SoftNmsMethod kMethod, class acc>
void run_one(const SoftNmsPlan& plan,
             const Tensor& scores,
             const Tensor& indices,
             const Tensor& count,
             cudaStream_t stream) {
  const Gathered<acc> gathered = gather<acc>(plan, nullptr, stream);
  const bool alone = plan.n <= kSoftNmsBlockBoxes;
  const auto kernel = alone ? soft_nms_kernel<kMethod, acc, SoftNmsBlockTeam>
                            : soft_nms_kernel<kMethod, acc, SoftNmsGridTeam>;
  const auto* function = reinterpret_cast<const void*>(kernel);
  const size_t shared = shared_bytes<acc>(plan, function);
  const int wanted = soft_nms_team_blocks(plan.n);
  const int blocks = alone ? 1 : cooperative_blocks(plan, function, shared, wanted);
  OptionalTensor room;
  if (!alone) room = room_for_keys<acc>(plan, blocks);

  SoftNmsRule<acc> rule = plan.rule<acc>();
  SoftNmsBoxes<acc> boxes = gathered.view(plan.n);
  auto* keys = room ? static_cast<SoftNmsKey<acc>*>(room->mutable_data_ptr()) : nullptr;
  acc* out_scores = mutable_data<acc>(scores);
  auto* out_indices = mutable_data<int64_t>(indices);
  auto* out_count = mutable_data<int64_t>(count);
  std::array<void*, 6> arguments{&rule, &boxes, &keys, &out_scores, &out_indices, &out_count};
  const auto launch =
      alone ? cudaLaunchKernel<const void> : cudaLaunchCooperativeKernel<const void>;
  check_cuda(
      launch(function, dim3(blocks), dim3(kSoftNmsThreads), arguments.data(), shared, stream),
      plan.op);
}

// Up to which size a class belongs to one block. A block takes a time that grows with the square of
// the class, but others work beside it; the grid takes one class after another, in a time that
// grows with their sum. They meet where size^2 = 28^2 n.
int largest_of_block(int64_t n) {
  const auto balanced = static_cast<int>(28 * std::sqrt(static_cast<double>(n)));
  return std::max(kSoftNmsBlockBoxes, balanced);
}

// Classes side by side; the order of the result is found by sorting the scores.
template <SoftNmsMethod kMethod, class acc>
Sorted run_classes(const SoftNmsPlan& plan, const Tensor& count, cudaStream_t stream) {
  const Sorted classes = sort_stable(*plan.classes, false);
  const auto* order = data<int64_t>(classes.order);
  const Gathered<acc> gathered = gather<acc>(plan, order, stream);
  const auto* function = reinterpret_cast<const void*>(soft_nms_classes_kernel<kMethod, acc>);
  const size_t shared = shared_bytes<acc>(plan, function);
  const int blocks =
      cooperative_blocks(plan, function, shared, div_up<int64_t>(plan.n, kSoftNmsChunk));
  const Tensor room = room_for_keys<acc>(plan, blocks);
  int block_boxes = largest_of_block(plan.n);
  const int64_t most_large = plan.n / block_boxes + 1;
  const Tensor ranges = empty({most_large, 2}, ScalarType::Int, plan.boxes);
  Tensor final_scores = empty({plan.n}, plan.arithmetic, plan.boxes);
  torch::stable::fill_(final_scores, kSoftNmsGone);

  SoftNmsRule<acc> rule = plan.rule<acc>();
  SoftNmsBoxes<acc> boxes = gathered.view(plan.n);
  const auto* ids = data<int64_t>(classes.values);
  auto* keys = static_cast<SoftNmsKey<acc>*>(room.mutable_data_ptr());
  auto* work = static_cast<SoftNmsWork*>(count.mutable_data_ptr());
  auto* large = reinterpret_cast<SoftNmsRange*>(mutable_data<int32_t>(ranges));
  acc* out = mutable_data<acc>(final_scores);
  std::array<void*, 9> arguments{
      &rule, &boxes, &ids, &order, &keys, &work, &large, &block_boxes, &out};
  check_cuda(cudaLaunchCooperativeKernel(
                 function, dim3(blocks), dim3(kSoftNmsThreads), arguments.data(), shared, stream),
             plan.op);
  return sort_stable(final_scores, true);
}

Result run_cuda(const SoftNmsPlan& plan) {
  if (plan.n == 0) {
    return {empty({0}, plan.result, plan.boxes), empty({0}, ScalarType::Long, plan.boxes)};
  }
  const DeviceGuard guard(plan.boxes.get_device_index());
  const cudaStream_t stream = current_stream(plan.boxes);
  static_assert(sizeof(SoftNmsWork) == 2 * sizeof(int64_t));
  const Tensor count = zeros({2}, ScalarType::Long, plan.boxes);  // one SoftNmsWork
  Tensor scores, indices;
  dispatch_soft_nms(plan, [&]<SoftNmsMethod kMethod, class acc>() {
    if (plan.classes) {
      const Sorted sorted = run_classes<kMethod, acc>(plan, count, stream);
      scores = sorted.values;
      indices = sorted.order;
    } else {
      scores = empty({plan.n}, plan.arithmetic, plan.boxes);
      indices = empty({plan.n}, ScalarType::Long, plan.boxes);
      run_one<kMethod, acc>(plan, scores, indices, count, stream);
    }
  });
  // The size of the result is data: the host has to wait for it. The only wait, and 8 bytes.
  int64_t* kept = pinned_word(plan.op);
  check_cuda(
      cudaMemcpyAsync(kept, data<int64_t>(count), sizeof(*kept), cudaMemcpyDeviceToHost, stream),
      plan.op);
  check_cuda(cudaStreamSynchronize(stream), plan.op);
  return {to_dtype(first_elements(scores, *kept), plan.result), first_elements(indices, *kept)};
}

Result soft_nms_cuda(const Tensor& boxes,
                     const Tensor& scores,
                     double iou_threshold,
                     double sigma,
                     double min_score,
                     int64_t method) {
  return run_cuda(plan_soft_nms(
      "soft_nms", boxes, scores, std::nullopt, {iou_threshold, sigma, min_score, method}));
}

Result batched_soft_nms_cuda(const Tensor& boxes,
                             const Tensor& scores,
                             const Tensor& idxs,
                             double iou_threshold,
                             double sigma,
                             double min_score,
                             int64_t method) {
  return run_cuda(plan_soft_nms(
      "batched_soft_nms", boxes, scores, idxs, {iou_threshold, sigma, min_score, method}));
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("soft_nms", OPZOO_BOX(opzoo::soft_nms_cuda));
  m.impl("batched_soft_nms", OPZOO_BOX(opzoo::batched_soft_nms_cuda));
}
