// SwiGLU by pointers: what cpu/swiglu.cpp launches and cpu/kernels/swiglu.cpp computes.
#pragma once

#include <cstdint>

#include "../capability.h"

namespace paracore {

// T is float, or uint16_t for the bits of bfloat16 numbers. Rows of `size` elements; strides are in elements,
// between rows; outputs are contiguous and may be inputs.
template <typename T>
struct SwiGLUForward {
  const T* gate;
  const T* up;
  T* y;
  int64_t size, gate_stride, up_stride;
};

template <typename T>
struct SwiGLUBackward {
  const T* dy;
  const T* gate;
  const T* up;
  T* dgate;
  T* dup;
  int64_t size, dy_stride, gate_stride, up_stride;
};

PARACORE_DECLARE_VARIANTS(
    // Of the elements [begin, end), counted through all rows.
    template <typename T>
    void swiglu_forward(const SwiGLUForward<T>& args, int64_t begin, int64_t end);

    template <typename T>
    void swiglu_backward(const SwiGLUBackward<T>& args, int64_t begin, int64_t end);)

}  // namespace paracore
