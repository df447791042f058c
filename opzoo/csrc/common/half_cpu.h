// SPDX-License-Identifier: Apache-2.0
// Runs of halves to fp32 and back on the CPU, by the machine's own instructions where it has them.
// Defined in half_cpu.cpp.
#pragma once

#include "common/types.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define OPZOO_HAS_F16C_INTRINSICS
#endif

namespace opzoo {

// Whether this machine has the instructions of OPZOO_HAS_F16C_INTRINSICS, 8 halves at a time.
bool has_f16c();

void widen(const Half* from, int64_t count, float* to);
void narrow(const float* from, int64_t count, Half* to);

}  // namespace opzoo
