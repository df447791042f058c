// SPDX-License-Identifier: Apache-2.0
// Runs of halves to fp32 and back on the CPU, by the machine's own instructions where it has them.
// Defined in half_cpu.cpp.
#pragma once

#include "common/types.h"

namespace opzoo {

void widen(const Half* from, int64_t count, float* to);
void narrow(const float* from, int64_t count, Half* to);

}  // namespace opzoo
