// SPDX-License-Identifier: Apache-2.0
#include "roi_align/roi_align_boxes_kernel.cuh"
#include "roi_align/roi_align_cuda_plan.h"

namespace opzoo {
namespace {

constexpr int64_t kMaxTableBytes = 46 * 1024;  // of the 48 KiB a block gets without asking
constexpr int64_t kMaxChunk = 1024;            // keeps the items of a chunk far below 2^31

// Blocks per RoI: enough of them to fill a GPU, none with less than a pass of its threads to do.
// Adaptive RoIs differ in work by orders of magnitude, and many small blocks keep the last one
// short: 1000 of them take 0.40 ms on an H200, and 0.70 ms with 1024 blocks.
int64_t blocks_per_roi(const RoIAlignParams& p, int64_t pieces, int64_t items_per_piece) {
  const int64_t blocks_wanted = p.sampling_ratio > 0 ? 1024 : 8192;
  const int64_t passes = div_up<int64_t>(pieces * items_per_piece, kBlockSize);
  const int64_t wanted = div_up<int64_t>(blocks_wanted, p.rois);
  return std::clamp<int64_t>(std::min(wanted, passes), 1, std::min<int64_t>(pieces, 65535));
}

template <class T>
bool takes_vectors(const RoIAlignParams& p, const T* input) {
  constexpr int64_t kVector = kBoxesVector<T>;
  return p.map_stride[kRoIChannel] == 1 && p.channels % kVector == 0 &&
         p.map_stride[kRoIBatch] % kVector == 0 && p.map_stride[kRoIRow] % kVector == 0 &&
         p.map_stride[kRoIColumn] % kVector == 0 && reinterpret_cast<uintptr_t>(input) % 16 == 0;
}

// Offsets of columns are 32-bit in the tables, and rows are numbered with 32 bits.
bool takes_tables(const RoIAlignParams& p, int64_t bytes) {
  constexpr double kLimit = static_cast<double>(int64_t{1} << 31);
  const double reach =
      static_cast<double>(p.width - 1) * static_cast<double>(p.map_stride[kRoIColumn]);
  return bytes <= kMaxTableBytes && reach < kLimit && static_cast<double>(p.height) < kLimit;
}

template <class T>
class BoxesLauncher {
  using acc = acc_t<T>;

 public:
  BoxesLauncher(const RoIAlignParams& p,
                const T* grad,
                const T* input,
                const Tensor& grad_boxes,
                cudaStream_t stream)
      : grad_boxes_(grad_boxes), stream_(stream) {
    problem_.p = p;
    problem_.grad = grad;
    problem_.input = input;
  }

  void launch(const char* op) {
    const RoIAlignParams& p = problem_.p;
    const int64_t rows = entries_at_most(p.pooled_height, p.height, p.sampling_ratio);
    const int64_t columns = entries_at_most(p.pooled_width, p.width, p.sampling_ratio);
    const int64_t bytes = edge_table_bytes<acc>(p.pooled_height, rows) +
                          edge_table_bytes<acc>(p.pooled_width, columns);
    const int64_t bins = p.pooled_height * p.pooled_width;
    constexpr int kGroup = sizeof(acc) == 8 ? 2 : 4;
    if (!takes_tables(p, bytes)) {
      run(op, roi_align_boxes_tableless_kernel<T>, p.channels, bins, 0);
      return;
    }
    problem_.row_capacity = static_cast<int>(rows);
    problem_.column_capacity = static_cast<int>(columns);
    if (takes_vectors(p, problem_.input)) {
      run(op, roi_align_boxes_channels_last_kernel<T>, p.channels / kBoxesVector<T>, bins, bytes);
    } else {
      const int64_t items = p.pooled_height * std::min(columns, 4 * p.pooled_width);
      run(op,
          roi_align_boxes_planes_kernel<T, kGroup>,
          div_up<int64_t>(p.channels, kGroup),
          items,
          bytes);
    }
  }

 private:
  // kernel over `pieces` of channels with some number of items each.
  template <class Kernel>
  void run(const char* op, Kernel kernel, int64_t pieces, int64_t items, int64_t bytes) {
    const RoIAlignParams& p = problem_.p;
    const int64_t blocks = blocks_per_roi(p, pieces, items);
    problem_.chunk = static_cast<int>(std::min(div_up(pieces, blocks), kMaxChunk));
    const dim3 grid(static_cast<unsigned>(p.rois), static_cast<unsigned>(blocks));
    const int columns = static_cast<int>(grad_boxes_.size(1));
    Tensor partial = grad_boxes_;
    problem_.columns = columns;
    if (blocks > 1) {
      partial = empty({p.rois, blocks, kEdges}, grad_boxes_.scalar_type(), grad_boxes_);
      problem_.columns = kEdges;
    }
    problem_.to = mutable_data<acc>(partial);
    kernel<<<grid, kBlockSize, static_cast<size_t>(bytes), stream_>>>(problem_);
    check_launch(op);
    if (blocks == 1) return;
    roi_align_boxes_sum_kernel<acc><<<grid_for(p.rois * columns), kBlockSize, 0, stream_>>>(
        p.rois, static_cast<int>(blocks), problem_.to, mutable_data<acc>(grad_boxes_), columns);
    check_launch(op);
  }

  BoxesProblem<T> problem_{};
  const Tensor& grad_boxes_;
  cudaStream_t stream_;
};

Tensor roi_align_boxes_backward_cuda(const Tensor& grad,
                                     const Tensor& input,
                                     const Tensor& boxes,
                                     const OptionalTensor& batch_index,
                                     double spatial_scale,
                                     int64_t sampling_ratio,
                                     bool aligned) {
  constexpr const char* kOp = "_roi_align_boxes_backward";
  const DeviceGuard guard(input.get_device_index());
  const RoIAlignOptions options{spatial_scale, sampling_ratio, aligned};
  const RoIAlignPlan plan = plan_roi_align_boxes(kOp, grad, input, boxes, batch_index, options);
  const RoIAlignParams& p = plan.params;
  const cudaStream_t stream = current_stream(input);
  check_image_indices(kOp, plan, stream);
  OPZOO_CHECK(p.rois < (int64_t{1} << 31), kOp, "boxes must be fewer than 2^31, got ", p.rois);
  if (p.rois == 0) return plan.out;
  if (p.channels == 0) return zeros(sizes_of(plan.out), plan.out.scalar_type(), plan.out);
  dispatch_floating(input.scalar_type(), kOp, [&]<class T>() {
    BoxesLauncher<T>(p, data<T>(grad), data<T>(input), plan.out, stream).launch(kOp);
  });
  return plan.out;
}

}  // namespace
}  // namespace opzoo

OPZOO_KERNELS(CUDA, m) {
  m.impl("_roi_align_boxes_backward", OPZOO_BOX(opzoo::roi_align_boxes_backward_cuda));
}
