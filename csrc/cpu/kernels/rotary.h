// Rotary embedding by pointers: what cpu/rotary.cpp launches and cpu/kernels/rotary.cpp computes.
#pragma once

#include <cstdint>

#include "../capability.h"

namespace paracore {

// The heads of a tensor [sequence, batch, heads, D] and where they go, which may be there too. Strides are in
// elements, of the first three dims. T is float, or uint16_t for the bits of bfloat16 numbers.
template <typename T>
struct RotatedHeads {
  const T* from;
  T* to;
  int64_t heads;
  int64_t from_strides[3], to_strides[3];
};

template <typename T>
struct RotatePair {
  RotatedHeads<T> q, k;
  const float* cos;  // [rows, half]
  const float* sin;
  const int64_t* positions;  // rows of these, by the strides of sequence and batch
  int64_t position_strides[2];
  int64_t batch, half;  // half: D / 2
  bool inverse;
};

PARACORE_DECLARE_VARIANTS(
    // Of the tokens [begin, end), counted through the sequence, the batch fastest.
    template <typename T>
    void rotate_pair(const RotatePair<T>& args, int64_t begin, int64_t end);)

}  // namespace paracore
