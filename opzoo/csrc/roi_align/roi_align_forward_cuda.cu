// SPDX-License-Identifier: Apache-2.0
// Which kernels pool, and in what shape. No torch here.
#include "roi_align/roi_align_forward_launch.cuh"
#include "roi_align/roi_align_forward_scratch.cuh"

namespace opzoo {
namespace {

constexpr int64_t kLimit32 = int64_t{1} << 31;
constexpr int64_t kMaxGridAxis = 65535;
constexpr int64_t kBandBytes = 4 * 1024;     // per axis
constexpr int64_t kStagedBytes = 26 * 1024;  // with the rest, what a block gets without asking
constexpr int64_t kBesideBytes = 18 * 1024;  // that rest: the bands, and what is of fixed size
// From this many RoIs on, copying what they touch is cheaper than reading each pixel of a
// contiguous map on its own.
constexpr int64_t kScratchRoIs = 48;

// The kernels over bands address one image with 32-bit offsets.
bool takes_bands(const RoIAlignParams& p) {
  if (p.pooled_height > kMaxBands || p.pooled_width > kMaxBands) return false;
  if (p.rois >= kLimit32 || p.channels >= kLimit32 / (p.pooled_height * p.pooled_width)) {
    return false;
  }
  const double extent =
      1.0 + static_cast<double>(p.height - 1) * static_cast<double>(p.map_stride[kRoIRow]) +
      static_cast<double>(p.width - 1) * static_cast<double>(p.map_stride[kRoIColumn]);
  return extent < static_cast<double>(kLimit32) && p.height < kLimit32 && p.width < kLimit32;
}

bool starts_on(const void* map, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(map) % static_cast<uintptr_t>(bytes) == 0;
}

// channels_last with 16-byte vectors: every pixel starts on a 16-byte boundary.
template <class T>
bool takes_vectors(const RoIAlignParams& p, const void* map) {
  constexpr int64_t kVector = kVectorOf<T>;
  return p.map_stride[kRoIChannel] == 1 && p.channels % kVector == 0 &&
         p.map_stride[kRoIBatch] % kVector == 0 && p.map_stride[kRoIRow] % kVector == 0 &&
         p.map_stride[kRoIColumn] % kVector == 0 && starts_on(map, 16);
}

// Whether a strip can be read in vectors of pixels.
template <class T>
bool takes_pixels(const RoIAlignParams& p, const void* map) {
  return p.map_stride[kRoIColumn] == 1 && p.map_stride[kRoIBatch] % kPixels == 0 &&
         p.map_stride[kRoIRow] % kPixels == 0 && p.map_stride[kRoIChannel] % kPixels == 0 &&
         starts_on(map, kPixels * static_cast<int64_t>(sizeof(T)));
}

// Entries per bin. A RoI with a bin of more gets the sample loop.
template <class acc>
int band_capacity(const RoIAlignParams& p, int64_t bins, int64_t size) {
  const int64_t room = kBandBytes / static_cast<int64_t>(bins * sizeof(BandEntry<acc>));
  const int64_t wanted = p.sampling_ratio > 0 ? std::min(2 * p.sampling_ratio, size) : size;
  return static_cast<int>(std::max<int64_t>(std::min(room, wanted), 1));
}

template <class acc>
BandCapacity capacity_of(const RoIAlignPyramid& pyramid) {
  int64_t height = 0;
  int64_t width = 0;
  for (int level = 0; level < pyramid.levels; ++level) {
    height = std::max(height, pyramid.level[level].height);
    width = std::max(width, pyramid.level[level].width);
  }
  const RoIAlignParams& p = pyramid.level[0];
  return {band_capacity<acc>(p, p.pooled_height, height),
          band_capacity<acc>(p, p.pooled_width, width)};
}

template <class T>
int64_t slices_of(const RoIAlignParams& p, int slice_bits) {
  return div_up<int64_t>(p.channels, int64_t{kVectorOf<T>} << slice_bits);
}

template <class T>
void launch_bands(const RoIAlignPyramid& pyramid,
                  T* output,
                  bool channels_last,
                  cudaStream_t stream) {
  const RoIAlignParams& p = pyramid.level[0];
  const BandCapacity capacity = capacity_of<acc_t<T>>(pyramid);
  const int64_t items = p.channels * p.pooled_height * p.pooled_width;
  const dim3 grid(
      static_cast<unsigned>(p.rois),
      static_cast<unsigned>(std::min<int64_t>(div_up<int64_t>(items, kBlockSize), kMaxGridAxis)));
  const int64_t bytes = capacity.bytes<acc_t<T>>(p);
  if (channels_last) {
    roi_align_bands_kernel<T, true><<<grid, kBlockSize, bytes, stream>>>(pyramid, output, capacity);
  } else {
    roi_align_bands_kernel<T, false>
        <<<grid, kBlockSize, bytes, stream>>>(pyramid, output, capacity);
  }
}

// The bytes a block gets for results if it asks.
int64_t most_staged_bytes() {
  constexpr int64_t kEnough = 104 * 1024;  // two blocks of a large GPU, and an L1 cache beside them
  int device = 0;
  int most = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  return std::clamp<int64_t>(most - kBesideBytes, kStagedBytes, kEnough);
}

template <class T>
BinsShape bins_shape(const RoIAlignPyramid& pyramid, bool vectors) {
  const RoIAlignParams& p = pyramid.level[0];
  BinsShape shape;
  shape.capacity = capacity_of<acc_t<T>>(pyramid);
  shape.inverse_width = static_cast<unsigned>(div_up<int64_t>(65536, p.pooled_width));
  shape.vectors = vectors;
  shape.slice_bits = 5;  // a warp on one bin
  while (shape.slice_bits > 0 && int64_t{1} << shape.slice_bits >= 2 * slices_of<T>(p, 0)) {
    --shape.slice_bits;
  }
  return shape;
}

template <class T>
void launch_in_place(const RoIAlignPyramid& pyramid, T* output, bool vectors, cudaStream_t stream) {
  // Twice what a large GPU holds, so that blocks of very different work end together.
  constexpr int64_t kBlocksWanted = 2048;
  const RoIAlignParams& p = pyramid.level[0];
  BinsShape shape = bins_shape<T>(pyramid, vectors);
  while (slices_of<T>(p, shape.slice_bits) > kMaxGridAxis) ++shape.slice_bits;
  const int64_t slices = slices_of<T>(p, shape.slice_bits);
  const int64_t items = p.pooled_height * p.pooled_width << shape.slice_bits;
  const int64_t split =
      std::clamp<int64_t>(kBlocksWanted / (p.rois * slices), 1, div_up<int64_t>(items, kBlockSize));
  const dim3 grid(
      static_cast<unsigned>(p.rois), static_cast<unsigned>(slices), static_cast<unsigned>(split));
  const int64_t bytes = shape.capacity.template bytes<acc_t<T>>(p);
  roi_align_bins_kernel<T, false, kBlockSize>
      <<<grid, kBlockSize, bytes, stream>>>(pyramid, output, shape);
}

template <class T, int kThreads>
void launch_staged_as(const RoIAlignPyramid& pyramid,
                      T* output,
                      const BinsShape& shape,
                      int64_t bytes,
                      cudaStream_t stream) {
  const RoIAlignParams& p = pyramid.level[0];
  if (bytes > kStagedBytes) {
    // The same for every call: another thread may launch the kernel at this moment.
    cudaFuncSetAttribute(roi_align_bins_kernel<T, true, kThreads>,
                         cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(most_staged_bytes() + 2 * kBandBytes));
  }
  const dim3 grid(static_cast<unsigned>(p.rois),
                  static_cast<unsigned>(slices_of<T>(p, shape.slice_bits)));
  roi_align_bins_kernel<T, true, kThreads>
      <<<grid, kThreads, shape.capacity.template bytes<acc_t<T>>(p) + bytes, stream>>>(
          pyramid, output, shape);
}

template <class T>
void launch_staged(const RoIAlignPyramid& pyramid, T* output, bool vectors, cudaStream_t stream) {
  constexpr int64_t kBlocksWanted = 256;
  constexpr int kFewBits = 2;  // runs of 64 bytes
  const RoIAlignParams& p = pyramid.level[0];
  const int64_t slab = 16 * staged_vectors(static_cast<int>(p.pooled_height * p.pooled_width));
  BinsShape shape = bins_shape<T>(pyramid, vectors);
  const auto narrow = [&] { return p.rois * slices_of<T>(p, shape.slice_bits) < kBlocksWanted; };
  while (shape.slice_bits > kFewBits && narrow()) --shape.slice_bits;
  const bool asks = slab << shape.slice_bits > kStagedBytes;
  const int64_t room = asks ? most_staged_bytes() : kStagedBytes;
  while (shape.slice_bits > 0 && slab << shape.slice_bits > room) --shape.slice_bits;
  if (slices_of<T>(p, shape.slice_bits) > kMaxGridAxis) {
    return launch_bands(pyramid, output, false, stream);
  }
  const int64_t bytes = slab << shape.slice_bits;
  if (bytes > kStagedBytes) {
    launch_staged_as<T, 512>(pyramid, output, shape, bytes, stream);
  } else {
    launch_staged_as<T, sizeof(T) == 2 ? 384 : 256>(pyramid, output, shape, bytes, stream);
  }
}

// The layout of the output decides.
template <class T>
void launch_bins(const RoIAlignPyramid& pyramid,
                 T* output,
                 bool channels_last,
                 cudaStream_t stream) {
  const RoIAlignParams& p = pyramid.level[0];
  // Of what leaves as one run: a pixel's channels, or a RoI's result.
  const int64_t run = channels_last ? p.channels : p.channels * p.pooled_height * p.pooled_width;
  const bool vectors = run % kVectorOf<T> == 0 && starts_on(output, 16);
  if (channels_last) {
    launch_in_place(pyramid, output, vectors, stream);
  } else {
    launch_staged(pyramid, output, vectors, stream);
  }
}

template <class T>
void launch_samples(const RoIAlignPyramid& pyramid,
                    T* output,
                    bool channels_last,
                    cudaStream_t stream) {
  const RoIAlignParams& p = pyramid.level[0];
  const unsigned grid = grid_for(p.rois * p.channels * p.pooled_height * p.pooled_width);
  if (channels_last) {
    roi_align_average_kernel<T, true><<<grid, kBlockSize, 0, stream>>>(pyramid, output);
  } else {
    roi_align_average_kernel<T, false><<<grid, kBlockSize, 0, stream>>>(pyramid, output);
  }
}

// The memory of the scratch copy: marks, then one map after the other.
template <class T>
struct ScratchPlan {
  Scratch scratch;
  int64_t strips = 0;       // of all levels
  int64_t mark_blocks = 0;  // of all levels
  int64_t bytes = 0;
  bool possible = true;

  ScratchPlan(const RoIAlignPyramid& pyramid, void* workspace) {
    constexpr int64_t kVector = kVectorOf<T>;
    constexpr int64_t kAlign = 256;
    scratch.from = scratch.to = pyramid;
    for (int level = 0; level < pyramid.levels; ++level) {
      const RoIAlignParams& p = pyramid.level[level];
      const int64_t row_strips = div_up<int64_t>(p.width, kStrip<T>);
      possible = possible && row_strips <= 32 * kMarkWords;
      scratch.level[level] = {strips,
                              mark_blocks,
                              static_cast<int>(row_strips),
                              takes_pixels<T>(p, pyramid.map[level])};
      strips += p.batch * p.height * row_strips;
      mark_blocks += p.batch * div_up<int64_t>(p.height, kMarkRows);
    }
    scratch.marks = static_cast<uint8_t*>(workspace);
    bytes = div_up<int64_t>(strips, kAlign) * kAlign;
    for (int level = 0; level < pyramid.levels; ++level) {
      RoIAlignParams& p = scratch.to.level[level];
      const int64_t pitch = div_up<int64_t>(p.channels, kVector) * kVector;
      p.map_stride[kRoIChannel] = 1;
      p.map_stride[kRoIColumn] = pitch;
      p.map_stride[kRoIRow] = p.width * pitch;
      p.map_stride[kRoIBatch] = p.height * p.width * pitch;
      possible = possible && takes_bands(p);
      scratch.to.map[level] = static_cast<char*>(workspace) + bytes;
      bytes += div_up<int64_t>(p.batch * p.map_stride[kRoIBatch] * static_cast<int64_t>(sizeof(T)),
                               kAlign) *
               kAlign;
    }
    possible = possible && strips < kLimit32 &&
               div_up<int64_t>(pyramid.level[0].channels, kStrip<T>) <= kMaxGridAxis;
  }
};

template <class T>
void launch_copy(const ScratchPlan<T>& plan, cudaStream_t stream) {
  constexpr int64_t kBlockChannels = kCopyThreads / (kStrip<T> / kPixels) * kVectorOf<T>;
  const int64_t channels = plan.scratch.from.level[0].channels;
  roi_align_mark_kernel<T>
      <<<static_cast<unsigned>(plan.mark_blocks), kMarkThreads, 0, stream>>>(plan.scratch);
  const dim3 grid(static_cast<unsigned>(plan.strips),
                  static_cast<unsigned>(div_up<int64_t>(channels, kBlockChannels)));
  roi_align_copy_kernel<T><<<grid, kCopyThreads, 0, stream>>>(plan.scratch);
}

enum class Path { kVectors, kScratch, kBands, kSamples };

template <class T>
Path path_of(const RoIAlignPyramid& pyramid) {
  bool vectors = true;
  for (int level = 0; level < pyramid.levels; ++level) {
    if (!takes_bands(pyramid.level[level])) return Path::kSamples;
    vectors = vectors && takes_vectors<T>(pyramid.level[level], pyramid.map[level]);
  }
  if (vectors) return Path::kVectors;
  const bool many = pyramid.level[0].rois >= kScratchRoIs;
  return many && ScratchPlan<T>(pyramid, nullptr).possible ? Path::kScratch : Path::kBands;
}

}  // namespace

template <class T>
int64_t average_workspace(const RoIAlignPyramid& pyramid, bool) {
  return path_of<T>(pyramid) == Path::kScratch ? ScratchPlan<T>(pyramid, nullptr).bytes : 0;
}

template <class T>
void launch_average(const RoIAlignPyramid& pyramid,
                    T* output,
                    bool channels_last,
                    void* workspace,
                    cudaStream_t stream) {
  switch (path_of<T>(pyramid)) {
    case Path::kVectors:
      launch_bins(pyramid, output, channels_last, stream);
      break;
    case Path::kScratch: {
      const ScratchPlan<T> plan(pyramid, workspace);
      launch_copy(plan, stream);
      launch_bins(plan.scratch.to, output, channels_last, stream);
      break;
    }
    case Path::kBands:
      launch_bands(pyramid, output, channels_last, stream);
      break;
    case Path::kSamples:
      launch_samples(pyramid, output, channels_last, stream);
      break;
  }
}

#define OPZOO_ROI_ALIGN_AVERAGE(T)                                     \
  template int64_t average_workspace<T>(const RoIAlignPyramid&, bool); \
  template void launch_average<T>(const RoIAlignPyramid&, T*, bool, void*, cudaStream_t);
OPZOO_ROI_ALIGN_AVERAGE(double)
OPZOO_ROI_ALIGN_AVERAGE(float)
OPZOO_ROI_ALIGN_AVERAGE(Half)
OPZOO_ROI_ALIGN_AVERAGE(BFloat16)
#undef OPZOO_ROI_ALIGN_AVERAGE

}  // namespace opzoo
