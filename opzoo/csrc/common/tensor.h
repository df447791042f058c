// SPDX-License-Identifier: Apache-2.0
// Everything opzoo asks of torch. This is the only header that names the ABI (LibTorch stable ABI,
// target 2.10); operators see opzoo::Tensor, opzoo::empty and the registration macros below.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#ifdef USE_CUDA
#include <cuda_runtime_api.h>

// Weak: in a CPU-only torch this does not exist, and _C must load there all the same. No CUDA
// kernel of opzoo can be reached without a CUDA torch, so it is never called while null.
#pragma weak aoti_torch_get_current_cuda_stream
#endif

// One schema block per operator (<op>.cpp), one kernel block per device file.
#define OPZOO_SCHEMAS(m) STABLE_TORCH_LIBRARY_FRAGMENT(opzoo, m)
#define OPZOO_KERNELS(key, m) STABLE_TORCH_LIBRARY_IMPL(opzoo, key, m)
#define OPZOO_BOX(function) TORCH_BOX(&function)

// A torch that is older than the headers cannot hand its message over; then the call is named.
#ifdef STABLE_TORCH_ERROR_CODE_CHECK
#define OPZOO_TORCH_CALL(call) STABLE_TORCH_ERROR_CODE_CHECK(call)
#else
#define OPZOO_TORCH_CALL(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace opzoo {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;
using OptionalTensor = std::optional<Tensor>;
using Sizes = std::vector<int64_t>;

inline Sizes sizes_of(const Tensor& t) {
  return {t.sizes().begin(), t.sizes().end()};
}
inline Sizes strides_of(const Tensor& t) {
  return {t.strides().begin(), t.strides().end()};
}

inline Sizes contiguous_strides(const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t axis = sizes.size(); axis-- > 0;) {
    strides[axis] = step;
    step *= sizes[axis] > 0 ? sizes[axis] : 1;
  }
  return strides;
}

// [N, C, H, W] with C fastest: the strides of torch.channels_last.
inline Sizes channels_last_strides(const Sizes& sizes) {
  const int64_t c = sizes[1] > 0 ? sizes[1] : 1;
  const int64_t h = sizes[2] > 0 ? sizes[2] : 1;
  const int64_t w = sizes[3] > 0 ? sizes[3] : 1;
  return {h * w * c, 1, w * c, c};
}

// True where torch would answer channels_last: C is the fastest axis of a dense [N, C, H, W] tensor
// and it is not contiguous in the plain order as well.
inline bool is_channels_last(const Tensor& t) {
  if (t.dim() != 4 || t.is_contiguous()) return false;
  const Sizes sizes = sizes_of(t);
  const Sizes expected = channels_last_strides(sizes);
  for (int axis = 0; axis < 4; ++axis) {
    if (sizes[axis] != 1 && t.stride(axis) != expected[axis]) return false;
  }
  return true;
}

// Debug mode (opzoo.set_debug): CUDA kernels may synchronise to report what they otherwise skip.
bool debug_mode();

// Testing aid (OPZOO_POISON=1): fresh memory is filled with NaN, so that an element no kernel wrote
// shows up in the result.
bool poison_allocations();

// Uninitialised memory on like's device, straight through the C shim (2 us cheaper than new_empty).
inline Tensor empty_strided(const Sizes& sizes,
                            const Sizes& strides,
                            ScalarType dtype,
                            const Tensor& like) {
  int32_t device_type;
  OPZOO_TORCH_CALL(aoti_torch_get_device_type(like.get(), &device_type));
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  AtenTensorHandle handle;
  OPZOO_TORCH_CALL(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()),
                                            sizes.data(),
                                            strides.data(),
                                            dtype_code,
                                            device_type,
                                            like.get_device_index(),
                                            &handle));
  Tensor result(handle);
  if (poison_allocations()) {
    const bool floating = dtype == ScalarType::Double || dtype == ScalarType::Float ||
                          dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
    torch::stable::fill_(result, floating ? std::numeric_limits<double>::quiet_NaN() : 77);
  }
  return result;
}

inline Tensor empty(const Sizes& sizes, ScalarType dtype, const Tensor& like) {
  return empty_strided(sizes, contiguous_strides(sizes), dtype, like);
}

inline Tensor zeros(const Sizes& sizes, ScalarType dtype, const Tensor& like) {
  Tensor result = empty(sizes, dtype, like);
  torch::stable::zero_(result);
  return result;
}

// The first elements of a tensor with one axis: a view where what it keeps alive is small, else in
// memory of their own. A copy costs two launches' time after a wait for the device.
inline Tensor first_elements(const Tensor& t, int64_t count) {
  constexpr int64_t kSmall = 8192;
  const Tensor first = torch::stable::narrow(const_cast<Tensor&>(t), 0, 0, count);
  return t.numel() <= kSmall + 1 ? first : torch::stable::clone(first);
}

inline Tensor to_dtype(const Tensor& t, ScalarType dtype) {
  return t.scalar_type() == dtype ? t : torch::stable::to(t, dtype);
}

inline Tensor contiguous(const Tensor& t) {
  return t.is_contiguous() ? t : torch::stable::contiguous(t);
}

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_data(const Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// body(begin, end) over [begin, end) in chunks of at least grain, on torch's own threads.
template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const Body& body) {
  torch::stable::parallel_for(begin, end, grain, body);
}

#ifdef USE_CUDA
// The stream torch is on for this device. Launching anywhere else races with the caller.
inline cudaStream_t current_stream(const Tensor& t) {
  void* stream = nullptr;
  OPZOO_TORCH_CALL(aoti_torch_get_current_cuda_stream(t.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

inline void check_cuda(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  std::string message = std::string("opzoo::") + op + ": " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice) {
    message += ". This build of opzoo holds kernels for " OPZOO_CUDA_ARCHS
               " and none for this GPU; rebuild with TORCH_CUDA_ARCH_LIST set to its architecture";
  }
  throw std::runtime_error(message);
}

// A word of pinned memory per host thread, which kernels write and the host reads.
inline int64_t* pinned_word(const char* op) {
  thread_local int64_t* word = nullptr;
  if (!word) check_cuda(cudaHostAlloc(&word, sizeof(*word), cudaHostAllocPortable), op);
  return word;
}

// Whether the current GPU is a Hopper and this build has code for sm_90a: wgmma exists in no other
// code, and that code runs on no other GPU.
inline bool has_wgmma(const char* op) {
  if (std::string_view(OPZOO_CUDA_ARCHS).find("9.0a") == std::string_view::npos) return false;
  int device = 0, major = 0, minor = 0;
  check_cuda(cudaGetDevice(&device), op);
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), op);
  check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), op);
  return major == 9 && minor == 0;
}

// Right after every launch: a launch error is otherwise reported by whoever synchronises next.
inline void check_launch(const char* op) {
  check_cuda(cudaGetLastError(), op);
}
#endif

}  // namespace opzoo
