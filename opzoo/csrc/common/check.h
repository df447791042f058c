// SPDX-License-Identifier: Apache-2.0
// Errors. Every message names the op, the argument, what was expected and what was got.
//   OPZOO_CHECK        -> RuntimeError: a tensor of the wrong rank, shape, dtype or device
//   OPZOO_CHECK_VALUE  -> ValueError:   a number out of its range
#pragma once

#include <sstream>
#include <stdexcept>

#include "common/tensor.h"

namespace opzoo {

template <class Error, class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "opzoo::" << op << ": ";
  (message << ... << parts);
  throw Error(message.str());
}

#define OPZOO_CHECK(condition, op, ...) \
  if (!(condition)) ::opzoo::fail<std::runtime_error>(op, __VA_ARGS__)
#define OPZOO_CHECK_VALUE(condition, op, ...) \
  if (!(condition)) ::opzoo::fail<std::invalid_argument>(op, __VA_ARGS__)

inline std::string to_string(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  for (size_t axis = 0; axis < sizes.size(); ++axis) text << (axis ? ", " : "") << sizes[axis];
  text << ']';
  return text.str();
}
inline std::string shape(const Tensor& t) {
  return to_string(sizes_of(t));
}

inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    default:
      return "an unsupported dtype";
  }
}

inline std::string device_name(const Tensor& t) {
  if (t.is_cpu()) return "cpu";
  return (t.is_cuda() ? "cuda:" : "device:") + std::to_string(t.get_device_index());
}

inline bool is_floating(ScalarType dtype) {
  return dtype == ScalarType::Double || dtype == ScalarType::Float || dtype == ScalarType::Half ||
         dtype == ScalarType::BFloat16;
}
inline bool is_integer(ScalarType dtype) {
  return dtype == ScalarType::Long || dtype == ScalarType::Int || dtype == ScalarType::Short ||
         dtype == ScalarType::Char || dtype == ScalarType::Byte;
}

// The dispatcher lets None pass for a tensor.
inline void check_defined(const char* op, const char* name, const Tensor& t) {
  OPZOO_CHECK(t.defined(), op, name, " must be a tensor, got None");
}

inline void check_floating(const char* op, const char* name, const Tensor& t) {
  check_defined(op, name, t);
  OPZOO_CHECK(is_floating(t.scalar_type()),
              op,
              name,
              " must be float64, float32, float16 or bfloat16, got ",
              dtype_name(t.scalar_type()));
}

inline void check_rank(const char* op, const char* name, const Tensor& t, int64_t rank) {
  OPZOO_CHECK(t.dim() == rank,
              op,
              name,
              " must have ",
              rank,
              " axes, got ",
              t.dim(),
              " (shape ",
              shape(t),
              ")");
}

inline void check_shape(const char* op, const char* name, const Tensor& t, const Sizes& expected) {
  OPZOO_CHECK(sizes_of(t) == expected,
              op,
              name,
              " must have shape ",
              to_string(expected),
              ", got ",
              shape(t));
}

inline void check_same_device(const char* op,
                              const char* name,
                              const Tensor& t,
                              const char* reference_name,
                              const Tensor& reference) {
  check_defined(op, name, t);
  check_defined(op, reference_name, reference);
  OPZOO_CHECK(t.is_cpu() == reference.is_cpu() && t.is_cuda() == reference.is_cuda() &&
                  t.get_device_index() == reference.get_device_index(),
              op,
              name,
              " must be on the device of ",
              reference_name,
              ", ",
              device_name(reference),
              ", got ",
              device_name(t));
}

inline void check_same_dtype(const char* op,
                             const char* name,
                             const Tensor& t,
                             const char* reference_name,
                             const Tensor& reference) {
  OPZOO_CHECK(t.scalar_type() == reference.scalar_type(),
              op,
              name,
              " must have the dtype of ",
              reference_name,
              ", ",
              dtype_name(reference.scalar_type()),
              ", got ",
              dtype_name(t.scalar_type()));
}

}  // namespace opzoo
