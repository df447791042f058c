// SPDX-License-Identifier: Apache-2.0
// The extension module itself. Importing opzoo._C runs the registrations of every other file; the
// module has no contents of its own.
#include <Python.h>

#include <atomic>
#include <cstdlib>

#include "common/tensor.h"

namespace opzoo {
namespace {

std::atomic<bool> debug_flag{false};

void set_debug(bool enabled) {
  debug_flag.store(enabled, std::memory_order_relaxed);
}

#ifdef OPZOO_WITH_CUDA
constexpr const char* kCuda = "true";
#else
constexpr const char* kCuda = "false";
#endif

#define OPZOO_TEXT(value) #value
#define OPZOO_AS_TEXT(value) OPZOO_TEXT(value)
#if defined(__GNUC__)
constexpr const char* kCompiler = OPZOO_AS_TEXT(__GNUC__) "." OPZOO_AS_TEXT(__GNUC_MINOR__);
#else
constexpr const char* kCompiler = "unknown";
#endif

// JSON, read by opzoo.info.
std::string build_info() {
  return std::string("{\"version\": \"") + OPZOO_VERSION + "\", \"cuda\": " + kCuda +
         ", \"cuda_archs\": \"" + OPZOO_CUDA_ARCHS + "\", \"built_with_torch\": \"" +
         OPZOO_BUILD_TORCH + "\", \"compiler\": \"gcc " + kCompiler +
         "\", \"stable_abi_target\": \"2.10\"}";
}

}  // namespace

bool debug_mode() {
  return debug_flag.load(std::memory_order_relaxed);
}

bool poison_allocations() {
  static const bool enabled = [] {
    const char* value = std::getenv("OPZOO_POISON");
    return value && value[0] == '1';
  }();
  return enabled;
}

}  // namespace opzoo

STABLE_TORCH_LIBRARY(opzoo, m) {
  m.def("_build_info() -> str");
  m.def("_set_debug(bool enabled) -> ()");
}

OPZOO_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("_build_info", OPZOO_BOX(opzoo::build_info));
  m.impl("_set_debug", OPZOO_BOX(opzoo::set_debug));
}

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "opzoo._C", nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModuleDef_Init(&module);
}
