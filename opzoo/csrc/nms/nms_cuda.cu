// SPDX-License-Identifier: Apache-2.0
#include <cub/device/device_radix_sort.cuh>

#include "nms/nms_dense_kernel.cuh"
#include "nms/nms_plan.h"
#include "nms/nms_sparse_kernel.cuh"

namespace opzoo {
namespace {

// Up to here boxes are ranked by counting and tested against all before them; a radix sort and the
// cells take over where their dozen launches are the smaller cost.
constexpr int64_t kDenseBoxes = 8192;
constexpr int64_t kStatesAlignment = 16;  // states are read 16 bytes at a time
// So many blocks run at once on a large GPU. With no more, stopping early at max_output saves
// nothing, and the blocks' reports would cost more than the rest.
constexpr int64_t kBlocksAtOnce = 1024;
// Images go through in groups of about this many boxes, which bounds the memory.
constexpr int64_t kGroupBoxes = int64_t(1) << 24;

// One allocation, cut into arrays. Two passes over the same cuts: the first counts the bytes.
class Workspace {
 public:
  template <class T>
  T* take(int64_t count) {
    constexpr int64_t kAlignment = 256;
    T* result = base_ ? reinterpret_cast<T*>(base_ + used_) : nullptr;
    used_ += div_up<int64_t>(count * static_cast<int64_t>(sizeof(T)), kAlignment) * kAlignment;
    return result;
  }
  void allocate(const Tensor& like) {
    memory_ = empty({used_}, ScalarType::Byte, like);
    base_ = mutable_data<uint8_t>(*memory_);
    used_ = 0;
  }

 private:
  OptionalTensor memory_;
  uint8_t* base_ = nullptr;
  int64_t used_ = 0;
};

template <class acc>
struct Arrays {
  NmsSorted<acc> sorted{};
  NmsProgress progress{};

  void cut(Workspace& space, const NmsPlan& plan, int64_t images, int64_t blocks) {
    sorted.pitch = div_up<int64_t>(plan.n, kStatesAlignment) * kStatesAlignment;
    const int64_t boxes = images * sorted.pitch;
    sorted.boxes = space.take<Box<acc>>(boxes);
    sorted.classes = plan.classes ? space.take<int64_t>(boxes) : nullptr;
    sorted.order = space.take<int>(boxes);
    sorted.states = space.take<NmsState>(boxes);
    progress.ticket = space.take<unsigned>(1);
    progress.frontier = space.take<unsigned long long>(images);
    progress.block_kept = space.take<int>(images * blocks);
  }
};

NmsInput input_of(const NmsPlan& plan, int64_t first_image) {
  NmsInput in{plan.boxes_view,
              plan.scores_view,
              plan.classes_view,
              {},
              {},
              plan.score_limit,
              static_cast<int>(plan.n)};
  dispatch_all(plan.boxes.scalar_type(), plan.op, [&]<class T>() {
    in.box_type = nms_type<T>();
    in.boxes.data = static_cast<const T*>(in.boxes.data) + first_image * in.boxes.image_stride;
  });
  dispatch_all(plan.scores.scalar_type(), plan.op, [&]<class T>() {
    in.score_type = nms_type<T>();
    in.scores.data = static_cast<const T*>(in.scores.data) + first_image * in.scores.image_stride;
  });
  if (in.classes.data) {
    in.classes.data =
        static_cast<const int64_t*>(in.classes.data) + first_image * in.classes.image_stride;
  }
  return in;
}

// 32-bit keys sort in half the passes.
template <class Body>
void dispatch_key(const NmsPlan& plan, Body&& body) {
  dispatch_all(plan.scores.scalar_type(), plan.op, [&]<class T>() {
    body.template operator()<std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>>();
  });
}

NmsOutput output_at(NmsOutput out, int64_t image) {
  out.indices += image * out.pitch;
  out.count += image;
  return out;
}

// Images of at most kDenseBoxes boxes: three launches for all of a group.
template <class acc>
struct DenseRun {
  Arrays<acc> arrays;
  NmsInput in{};

  void operator()(const NmsPlan& plan, acc threshold, const NmsOutput& out, cudaStream_t stream) {
    const int n = static_cast<int>(plan.n);
    const int blocks = div_up(n, kNmsDenseBlockBoxes);
    const int64_t group = std::min(plan.images, std::max<int64_t>(1, kGroupBoxes / plan.n));
    arrays.cut(space, plan, group, blocks);
    space.allocate(plan.boxes);
    arrays.cut(space, plan, group, blocks);
    for (int64_t image = 0; image < plan.images; image += group) {
      const auto images = static_cast<unsigned>(std::min(group, plan.images - image));
      in = input_of(plan, image);
      dispatch_key(plan, [&]<class Key>() {
        nms_rank_kernel<acc, Key>
            <<<images * div_up(n, kNmsRankTargets), kNmsRankThreads, 0, stream>>>(
                in, arrays.sorted, arrays.progress, blocks, threshold);
      });
      check_launch(plan.op);
      const int64_t max_output =
          int64_t(images) * blocks > kBlocksAtOnce ? plan.max_output : plan.n;
      nms_dense_kernel<acc><<<images * blocks, kNmsDenseWarps * 32, 0, stream>>>(
          arrays.sorted, arrays.progress, n, max_output, threshold);
      check_launch(plan.op);
      nms_compact_kernel<<<images * div_up(n, kNmsCompactBoxes), kNmsCompactThreads, 0, stream>>>(
          arrays.sorted.states, arrays.sorted.order, n, arrays.sorted.pitch, output_at(out, image));
      check_launch(plan.op);
    }
  }

 private:
  Workspace space;
};

template <class Key>
__global__ void nms_key_kernel(NmsInput in, Key* keys, int* indices) {
  for (int64_t i = first_item(); i < in.n; i += item_step()) {
    keys[i] = nms_load_key<Key>(in, 0, i);
    indices[i] = static_cast<int>(i);
  }
}

// Images of any size, one after another.
template <class acc>
struct SparseRun {
  Arrays<acc> arrays;
  NmsInput in{};

  void operator()(const NmsPlan& plan, acc threshold, const NmsOutput& out, cudaStream_t stream) {
    n = static_cast<int>(plan.n);
    while (static_cast<int64_t>(1) << bits < 2 * plan.n && bits < 31) ++bits;
    cells.mask = static_cast<unsigned>((int64_t(1) << bits) - 1);
    dispatch_key(plan, [&]<class Key>() {
      size_t for_scores = 0, for_cells = 0;
      check_cuda(sort<Key>(nullptr, for_scores, nullptr, nullptr, 8 * sizeof(Key), stream),
                 plan.op);
      check_cuda(sort<unsigned>(nullptr, for_cells, nullptr, nullptr, bits, stream), plan.op);
      scratch_bytes = std::max(for_scores, for_cells);
      cut<Key>(plan);
      space.allocate(plan.boxes);
      cut<Key>(plan);
      for (int64_t image = 0; image < plan.images; ++image) {
        in = input_of(plan, image);
        run_image<Key>(plan, threshold, output_at(out, image), stream);
      }
    });
  }

 private:
  // keys and values, each with the place its sorted copy goes to behind it
  template <class Key>
  cudaError_t sort(
      void* memory, size_t& bytes, Key* keys, int* values, int end_bit, cudaStream_t stream) {
    return cub::DeviceRadixSort::SortPairs(
        memory, bytes, keys, keys + n, values, values + n, n, 0, end_bit, stream);
  }

  template <class Key>
  void cut(const NmsPlan& plan) {
    arrays.cut(space, plan, 1, div_up<int64_t>(plan.n, kNmsSparseWarps));
    keys = space.take<uint64_t>(2 * plan.n);
    indices = space.take<int>(2 * plan.n);
    cells.ranges = space.take<int2>(int64_t(cells.mask) + 1);
    bucket_boxes = space.take<Box<acc>>(plan.n);
    scratch = space.take<uint8_t>(static_cast<int64_t>(scratch_bytes));
  }

  template <class Key>
  void run_image(const NmsPlan& plan, acc threshold, const NmsOutput& out, cudaStream_t stream) {
    const unsigned grid = grid_for(n);
    auto* score_keys = reinterpret_cast<Key*>(keys);
    nms_key_kernel<Key><<<grid, kBlockSize, 0, stream>>>(in, score_keys, indices);
    check_launch(plan.op);
    check_cuda(sort(scratch, scratch_bytes, score_keys, indices, 8 * sizeof(Key), stream), plan.op);

    const NmsGeometry geometry(plan.iou_threshold, !plan.classes);
    cells.keys = reinterpret_cast<unsigned*>(keys);
    // The sorted indices are read while the ranks are written in front of them.
    nms_place_kernel<acc><<<grid, kBlockSize, 0, stream>>>(
        in, arrays.sorted, 0, indices + n, geometry, cells, arrays.progress, indices, threshold);
    check_launch(plan.op);
    if (plan.iou_threshold >= kNmsSparseThreshold) {
      check_cuda(sort(scratch, scratch_bytes, cells.keys, indices, bits, stream), plan.op);
      nms_bucket_kernel<<<grid, kBlockSize, 0, stream>>>(
          cells.keys + n, indices + n, arrays.sorted.boxes, n, cells.ranges, bucket_boxes);
      check_launch(plan.op);
      nms_sparse_kernel<acc>
          <<<static_cast<unsigned>(div_up(n, kNmsSparseWarps)), kNmsSparseWarps * 32, 0, stream>>>(
              arrays.sorted,
              bucket_boxes,
              indices + n,
              geometry,
              cells,
              arrays.progress,
              n,
              plan.max_output,
              threshold);
    } else {
      nms_dense_kernel<acc>
          <<<static_cast<unsigned>(div_up(n, kNmsDenseBlockBoxes)),
             kNmsDenseWarps * 32,
             0,
             stream>>>(arrays.sorted, arrays.progress, n, plan.max_output, threshold);
    }
    check_launch(plan.op);
    nms_compact_kernel<<<static_cast<unsigned>(div_up(n, kNmsCompactBoxes)),
                         kNmsCompactThreads,
                         0,
                         stream>>>(
        arrays.sorted.states, arrays.sorted.order, n, arrays.sorted.pitch, out);
    check_launch(plan.op);
  }

  Workspace space;
  NmsCells cells{};
  uint64_t* keys = nullptr;
  int* indices = nullptr;
  Box<acc>* bucket_boxes = nullptr;
  uint8_t* scratch = nullptr;
  size_t scratch_bytes = 0;
  int n = 0, bits = 1;
};

// after(run) sees the sorted boxes of the last image.
template <class After>
void run(const NmsPlan& plan, const NmsOutput& out, cudaStream_t stream, const After& after) {
  OPZOO_CHECK(plan.n < (int64_t(1) << 30),
              plan.op,
              "boxes must be fewer than 2^30 per image on CUDA, got ",
              plan.n);
  const auto with = [&]<class acc>(acc threshold) {
    if (plan.n <= kDenseBoxes) {
      DenseRun<acc> run;
      run(plan, threshold, out, stream);
      after(run.arrays.sorted, run.in, threshold);
    } else {
      SparseRun<acc> run;
      run(plan, threshold, out, stream);
      after(run.arrays.sorted, run.in, threshold);
    }
  };
  dispatch_all(plan.boxes.scalar_type(), plan.op, [&]<class T>() {
    with(static_cast<box_acc_t<T>>(plan.iou_threshold));
  });
}

constexpr auto kNothing = [](const auto&...) {};

Tensor run_cuda(const NmsPlan& plan) {
  const int64_t limit = std::min(plan.max_output, plan.n);
  if (limit == 0) return empty({0}, ScalarType::Long, plan.boxes);
  const DeviceGuard guard(plan.boxes.get_device_index());
  const cudaStream_t stream = current_stream(plan.boxes);
  const Tensor indices = empty({limit + 1}, ScalarType::Long, plan.boxes);
  auto* out = mutable_data<int64_t>(indices);
  int64_t* kept = pinned_word(plan.op);
  run(plan, {out, out + limit, kept, limit, limit, false}, stream, kNothing);

  // The size of the result is data: the host has to wait for it. The only wait.
  check_cuda(cudaStreamSynchronize(stream), plan.op);
  return first_elements(indices, *kept);
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

std::tuple<Tensor, Tensor> nms_padded_cuda(const Tensor& boxes,
                                           const Tensor& scores,
                                           double iou_threshold,
                                           int64_t max_output,
                                           const OptionalTensor& idxs,
                                           std::optional<double> score_threshold) {
  const NmsPlan plan =
      plan_nms_padded(boxes, scores, iou_threshold, max_output, idxs, score_threshold);
  const DeviceGuard guard(plan.boxes.get_device_index());
  Sizes sizes = plan.batch_sizes;
  Tensor count = empty(sizes, ScalarType::Long, plan.boxes);
  sizes.push_back(max_output);
  Tensor indices = empty(sizes, ScalarType::Long, plan.boxes);
  if (plan.images == 0 || plan.n == 0 || max_output == 0) {
    torch::stable::fill_(indices, -1);
    torch::stable::zero_(count);
    return {indices, count};
  }
  run(plan,
      {mutable_data<int64_t>(indices),
       mutable_data<int64_t>(count),
       nullptr,
       max_output,
       std::min(max_output, plan.n),
       true},
      current_stream(plan.boxes),
      kNothing);
  return {indices, count};
}

Tensor nms_leaders_cuda(const Tensor& boxes, const Tensor& scores, double iou_threshold) {
  const NmsPlan plan = plan_nms(
      "_nms_leaders", boxes, scores, std::nullopt, iou_threshold, std::nullopt, std::nullopt);
  Tensor leaders = empty({plan.n}, ScalarType::Long, plan.boxes);
  if (plan.n == 0) return leaders;
  const DeviceGuard guard(plan.boxes.get_device_index());
  const cudaStream_t stream = current_stream(plan.boxes);
  const Tensor kept = empty({plan.n + 1}, ScalarType::Long, plan.boxes);
  auto* indices = mutable_data<int64_t>(kept);
  int64_t* count = indices + plan.n;
  const NmsOutput out{indices, count, nullptr, plan.n, plan.n, false};
  run(plan,
      out,
      stream,
      [&]<class acc>(const NmsSorted<acc>& sorted, const NmsInput& in, acc threshold) {
        nms_leaders_kernel<<<grid_for(plan.n * 32), kBlockSize, 0, stream>>>(
            sorted, in, indices, count, threshold, mutable_data<int64_t>(leaders));
        check_launch(plan.op);
      });
  return leaders;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("nms", OPZOO_BOX(opzoo::nms_cuda));
  m.impl("batched_nms", OPZOO_BOX(opzoo::batched_nms_cuda));
  m.impl("nms_padded", OPZOO_BOX(opzoo::nms_padded_cuda));
  m.impl("_nms_leaders", OPZOO_BOX(opzoo::nms_leaders_cuda));
}
