// SPDX-License-Identifier: Apache-2.0
// The pointwise half of an LLTM cell; the matrix product that makes the gates stays torch's.
//
//   gates      [N, 3*S]   input gate, output gate, candidate of every row, before their functions
//   old_cell   [N, S]
//   new_cell = old_cell + elu(candidate) * sigmoid(input gate)
//   new_h    = tanh(new_cell) * sigmoid(output gate)
//
// All contiguous and of one floating dtype; arithmetic in fp32, in fp64 for fp64. N and S may be 0.
// Deterministic: every element is written once. No torch in this file.
#pragma once

#include <cmath>

#include "common/types.h"

namespace lltm {

using opzoo::acc_t;

template <class T>
struct CellParams {
  int64_t rows, size;
  const T* gates;
  const T* cell;  // the old one in the forward, the new one in the backward
};

// Where element `item` of [N, S] finds its three gates.
struct GatePlaces {
  int64_t input, output, candidate;
};

OPZOO_HOST_DEVICE GatePlaces gates_of(int64_t item, int64_t size) {
  const int64_t first = item / size * 3 * size + item % size;
  return {first, first + size, first + 2 * size};
}

template <class acc>
OPZOO_HOST_DEVICE acc sigmoid(acc x) {
  return acc(1) / (acc(1) + exp(-x));
}

// [forward
template <class T>
OPZOO_HOST_DEVICE void cell_element(const CellParams<T>& p, T* new_h, T* new_cell, int64_t item) {
  using acc = acc_t<T>;
  const GatePlaces at = gates_of(item, p.size);
  const acc x = static_cast<acc>(p.gates[at.candidate]);
  const acc candidate = x > 0 ? x : expm1(x);
  const acc cell =
      static_cast<acc>(p.cell[item]) + candidate * sigmoid(static_cast<acc>(p.gates[at.input]));
  new_cell[item] = static_cast<T>(cell);
  new_h[item] = static_cast<T>(tanh(cell) * sigmoid(static_cast<acc>(p.gates[at.output])));
}
// forward]

// [backward
template <class T>
OPZOO_HOST_DEVICE void cell_gradient(const CellParams<T>& p,
                                     const T* grad_h,
                                     const T* grad_new_cell,
                                     T* grad_gates,
                                     T* grad_old_cell,
                                     int64_t item) {
  using acc = acc_t<T>;
  const GatePlaces at = gates_of(item, p.size);
  const acc in = sigmoid(static_cast<acc>(p.gates[at.input]));
  const acc out = sigmoid(static_cast<acc>(p.gates[at.output]));
  const acc x = static_cast<acc>(p.gates[at.candidate]);
  const acc squashed = tanh(static_cast<acc>(p.cell[item]));
  const acc dh = static_cast<acc>(grad_h[item]);
  // The new cell is a result of its own and also goes into new_h: two paths, one sum.
  const acc dcell = static_cast<acc>(grad_new_cell[item]) + dh * out * (1 - squashed * squashed);
  grad_old_cell[item] = static_cast<T>(dcell);
  grad_gates[at.input] = static_cast<T>(dcell * (x > 0 ? x : expm1(x)) * in * (1 - in));
  grad_gates[at.output] = static_cast<T>(dh * squashed * out * (1 - out));
  grad_gates[at.candidate] = static_cast<T>(dcell * in * (x > 0 ? acc(1) : exp(x)));
}
// backward]

}  // namespace lltm
