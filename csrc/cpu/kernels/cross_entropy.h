// Cross entropy by pointers: what cpu/cross_entropy.cpp launches and cpu/kernels/cross_entropy.cpp computes.
#pragma once

#include <cstdint>

#include "../capability.h"

namespace paracore {

// T is float, or uint16_t for the bits of bfloat16 numbers. Strides are in elements, between rows.
template <typename T>
struct CrossEntropyStatistics {
  const T* logits;        // [tokens, size]
  const int64_t* labels;  // [tokens]
  float* statistics;      // [4, tokens]
  int64_t tokens, size, stride;
};

template <typename T>
struct CrossEntropyGradient {
  const T* logits;            // [tokens, size]
  const int64_t* labels;      // [tokens]
  const float* maximum;       // [tokens]
  const float* log_sum;       // [tokens]
  const float* coefficients;  // [3, tokens]
  T* dlogits;                 // [tokens, size]; may be the logits
  int64_t tokens, size, stride, dlogits_stride;
};

PARACORE_DECLARE_VARIANTS(
    // Of the tokens [begin, end).
    template <typename T>
    void cross_entropy_statistics(const CrossEntropyStatistics<T>& args, int64_t begin, int64_t end);

    template <typename T>
    void cross_entropy_gradient(const CrossEntropyGradient<T>& args, int64_t begin, int64_t end);)

}  // namespace paracore
