// An embedding's gradient by pointers: what cpu/embedding.cpp launches and cpu/kernels/embedding.cpp computes.
#pragma once

#include <cstdint>

#include "../capability.h"

namespace paracore {

// The most columns that one call takes: their float32 sums lie in the first cache.
constexpr int64_t kEmbeddingColumns = 1024;

// T is float, or uint16_t for the bits of bfloat16 numbers.
template <typename T>
struct EmbeddingGradient {
  const T* dy;            // [tokens, size], by dy_stride
  const int64_t* begins;  // [rows + 1]: where in `order` the tokens of each row are
  const int64_t* order;   // tokens sorted by row, each row's in ascending order
  T* total;               // [rows, size], contiguous
  int64_t size, dy_stride;
};

PARACORE_DECLARE_VARIANTS(
    // Of the rows [begin, end), the columns from `column` on.
    template <typename T>
    void embedding_gradient(
        const EmbeddingGradient<T>& args, int64_t begin, int64_t end, int64_t column, int64_t columns);)

}  // namespace paracore
