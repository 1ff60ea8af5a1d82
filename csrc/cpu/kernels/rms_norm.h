// RMSNorm over rows, by pointers: what cpu/rms_norm.cpp launches and cpu/kernels/rms_norm.cpp computes.
#pragma once

#include <cstdint>

#include "../capability.h"

namespace paracore {

// T is the dtype of x, residual, y and h. Strides are in elements, between rows; outputs are contiguous.
template <typename T>
struct RMSNormForward {
  const T* x;           // [rows, hidden]
  const T* residual;    // [rows, hidden] or null
  const float* weight;  // [hidden]
  T* y;                 // [rows, hidden]
  T* h;                 // [rows, hidden], written when there is a residual
  float* rstd;          // [rows]
  int64_t hidden, x_stride, residual_stride;
  float eps;
};

template <typename T>
struct RMSNormBackward {
  const T* dy;          // [rows, hidden]
  const T* dh;          // [rows, hidden] or null
  const T* h;           // [rows, hidden]
  const float* weight;  // [hidden]
  const float* rstd;    // [rows]
  T* dx;                // [rows, hidden]
  int64_t hidden, dy_stride, dh_stride, h_stride;
};

PARACORE_DECLARE_VARIANTS(
    // y, h and rstd of the rows [begin, end).
    template <typename T>
    void rms_norm_forward(const RMSNormForward<T>& args, int64_t begin, int64_t end);

    // dx of the rows [begin, end), and in dweight [hidden] those rows' part of the weight's gradient.
    template <typename T>
    void rms_norm_backward(const RMSNormBackward<T>& args, int64_t begin, int64_t end, float* dweight);

    // to[i] = sum over the rows of from[row, i], for i in [begin, end), rows in ascending order.
    template <typename W>
    void sum_rows(const float* from, int64_t rows, int64_t columns, int64_t begin, int64_t end, W* to);)

}  // namespace paracore
