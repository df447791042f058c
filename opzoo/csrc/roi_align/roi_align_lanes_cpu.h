// SPDX-License-Identifier: Apache-2.0
// The inner loops of average RoIAlign on the CPU, over matrices of lines: line i of a matrix of
// channels holds one pixel or one bin, its lanes are neighbouring channels. Every function exists
// for the widest vectors of the machine and adds in the order of the terms without contraction,
// so the result depends on neither. Defined in roi_align_lanes_cpu.cpp for all four types.
#pragma once

#include "common/lanes_cpu.h"

namespace opzoo {

// Of row i of a banded matrix: terms [first[i], first[i + 1]), ascending in index.
template <class acc>
struct Term {
  int64_t index;
  acc weight;
};

// lines[i][lane] = sum over terms of weight * map[index * term_stride + offsets[i] + lane].
template <class T>
void sum_runs(const T* map,
              const Term<acc_t<T>>* terms,
              int64_t term_count,
              int64_t term_stride,
              const int64_t* offsets,
              int64_t count,
              int64_t lanes,
              acc_t<T>* lines,
              int64_t line_stride);

// lines[i * kLaneStep + j][plane] = sum over terms of
// weight * map[plane * plane_stride + index * term_stride + offsets[i] + j], j < kLaneStep.
// rows: room for planes * count * kLaneStep.
template <class T>
void sum_planes(const T* map,
                const Term<acc_t<T>>* terms,
                int64_t term_count,
                int64_t term_stride,
                const int64_t* offsets,
                int64_t count,
                int64_t planes,
                int64_t plane_stride,
                acc_t<T>* rows,
                acc_t<T>* lines,
                int64_t line_stride);

// to[i] = sum over the terms of row i of weight * from[index]; lanes is a multiple of kLaneStep.
template <class acc>
void multiply_banded(const Term<acc>* terms,
                     const int64_t* first,
                     int64_t rows,
                     const acc* from,
                     int64_t lanes,
                     acc* to);

// to[offsets[i] + lane] += weight * from[i][lane]; lanes is a multiple of kLaneStep.
template <class acc>
void add_weighted(
    acc weight, const acc* from, int64_t lanes, const int64_t* offsets, int64_t count, acc* to);

// to[j * to_stride + i] = from[i * from_stride + j] for i < lines, j < length.
template <class acc>
void transpose(const acc* from,
               int64_t from_stride,
               int64_t lines,
               int64_t length,
               acc* to,
               int64_t to_stride);

// Line by line, to an accumulator and back (rounding once).
template <class T>
void load_lines(const T* from,
                int64_t from_stride,
                int64_t lines,
                int64_t length,
                acc_t<T>* to,
                int64_t to_stride);
template <class T>
void store_lines(const acc_t<T>* from,
                 int64_t from_stride,
                 int64_t lines,
                 int64_t length,
                 T* to,
                 int64_t to_stride);

}  // namespace opzoo
