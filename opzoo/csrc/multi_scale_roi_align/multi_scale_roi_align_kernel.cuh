// SPDX-License-Identifier: Apache-2.0
// The kernels are roi_align's. Either direction is one host function over the whole pyramid, in
// which every RoI's level is chosen on the device.
#pragma once

#include "roi_align/roi_align_backward_launch.cuh"
#include "roi_align/roi_align_forward_launch.cuh"
