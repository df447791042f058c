// SPDX-License-Identifier: Apache-2.0
// From a run-time dtype to a compile-time type:
//   dispatch_floating(x.scalar_type(), "roi_align", [&]<class T>() { run<T>(x); });
#pragma once

#include <cstdint>

#include "common/check.h"
#include "common/types.h"

namespace opzoo {

template <class Body>
void dispatch_floating(ScalarType dtype, const char* op, Body&& body) {
  switch (dtype) {
    case ScalarType::Double:
      return body.template operator()<double>();
    case ScalarType::Float:
      return body.template operator()<float>();
    case ScalarType::Half:
      return body.template operator()<Half>();
    case ScalarType::BFloat16:
      return body.template operator()<BFloat16>();
    default:
      fail<std::runtime_error>(op, "no kernel for ", dtype_name(dtype));
  }
}

template <class Body>
void dispatch_all(ScalarType dtype, const char* op, Body&& body) {
  switch (dtype) {
    case ScalarType::Long:
      return body.template operator()<int64_t>();
    case ScalarType::Int:
      return body.template operator()<int32_t>();
    case ScalarType::Short:
      return body.template operator()<int16_t>();
    case ScalarType::Char:
      return body.template operator()<int8_t>();
    case ScalarType::Byte:
      return body.template operator()<uint8_t>();
    case ScalarType::Bool:
      return body.template operator()<bool>();
    default:
      return dispatch_floating(dtype, op, body);
  }
}

}  // namespace opzoo
