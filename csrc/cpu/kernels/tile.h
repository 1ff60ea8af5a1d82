// Tiles of tensors in scratch memory, laid out for matrix_product.h.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include <algorithm>
#include <cstddef>

#include "matrix_product.h"

namespace paracore {
namespace CPU_CAPABILITY {

inline int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Words between rows of `words`: whole cache lines, and an odd number of them, for rows a power of two apart would
// all fall into the same few sets of the cache.
constexpr int64_t row_stride(int64_t words) {
  return ((words + 15) / 16 | 1) * 16;
}
constexpr int64_t kTileStride = row_stride(kAttentionTile);

template <Products kProducts>
inline int64_t words_of(int64_t numbers) {
  constexpr int64_t kNumbers = Multiplier<kProducts>::kNumbers;
  return (numbers + kNumbers - 1) / kNumbers;
}

// Hands out pieces of scratch memory, each on a cache line of its own. From no memory it hands out nothing of use,
// but tells how much there would have to be.
class Carver {
 public:
  explicit Carver(std::byte* memory) : memory_(reinterpret_cast<uintptr_t>(memory)) {}

  template <typename T>
  Matrix<T> matrix(int64_t rows, int64_t stride) {
    return {array<T>(rows * stride), stride};
  }

  template <typename T>
  T* array(int64_t size) {
    const uintptr_t begin = memory_ + size_;
    size_ += round_up(size * static_cast<int64_t>(sizeof(T)), 64);
    return reinterpret_cast<T*>(begin);
  }

  size_t size() const { return size_; }

 private:
  uintptr_t memory_;
  size_t size_ = 0;
};

inline Words widened(const uint16_t* from) {
  return __builtin_convertvector(load<Halves>(from), Words) << 16;
}

inline void copy_row(const float* from, int64_t size, float* to) {
  std::copy_n(from, size, to);
}

inline void copy_row(const uint16_t* from, int64_t size, float* to) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    store(to + i, widened(from + i));
  }
  for (; i < size; ++i) {
    to[i] = widen(from[i]);
  }
}

inline void copy_row(const uint16_t* from, int64_t size, uint32_t* to) {
  std::memcpy(to, from, size * sizeof(*from));
  if (size % 2 != 0) {
    to[size / 2] = from[size - 1];
  }
}

// Each row of `from` as words, zeros behind them as far as a block of columns may read.
template <Products kProducts, typename T>
inline void copy_rows(
    const T* from, int64_t from_stride, int64_t rows, int64_t size, const Matrix<Word<kProducts>>& to) {
  const int64_t words = words_of<kProducts>(size), padded = round_up(words, 16);
  for (int64_t row = 0; row < rows; ++row) {
    Word<kProducts>* const line = to.row(row);
    copy_row(from + row * from_stride, size, line);
    std::fill(line + words, line + padded, Word<kProducts>{});
  }
}

// Row i of the result holds the pairs of the rows 2i and 2i + 1; zeros stand for a row that is not there.
inline void copy_row_pairs(
    const uint16_t* from, int64_t from_stride, int64_t rows, int64_t size, const Matrix<uint32_t>& to) {
  const int64_t padded = round_up(size, 16);
  for (int64_t row = 0; row < rows; row += 2) {
    const uint16_t* const lower = from + row * from_stride;
    const uint16_t* const upper = lower + from_stride;
    const bool single = row + 1 == rows;
    uint32_t* const line = to.row(row / 2);
    int64_t i = 0;
    for (; !single && i + kLanes <= size; i += kLanes) {
      store(line + i, __builtin_convertvector(load<Halves>(lower + i), Words) | widened(upper + i));
    }
    for (; i < size; ++i) {
      line[i] = lower[i] | (single ? 0u : static_cast<uint32_t>(upper[i]) << 16);
    }
    std::fill(line + size, line + padded, 0u);
  }
}

// to[word][row] = from[row][word], with zeros for the rows that a full tile would have more.
template <typename W>
inline void transpose(const Matrix<W>& from, int64_t rows, int64_t words, const Matrix<W>& to) {
  for (int64_t word = 0; word < words; ++word) {
    W* const line = to.row(word);
    for (int64_t row = 0; row < rows; ++row) {
      line[row] = from.row(row)[word];
    }
    std::fill(line + rows, line + kAttentionTile, W{});
  }
}

// As copy_row_pairs, from numbers that are rounded to bfloat16 here. `rows` is even, `columns` is rounded up.
inline void round_to_row_pairs(
    const Matrix<float>& from, int64_t rows, int64_t columns, const Matrix<uint32_t>& to) {
  for (int64_t row = 0; row < rows; row += 2) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      const Words lower = round_to_bfloat16(load<Floats>(from.row(row) + i));
      const Words upper = round_to_bfloat16(load<Floats>(from.row(row + 1) + i));
      store(to.row(row / 2) + i, (lower >> 16) | upper);
    }
  }
}

// Each row rounded to bfloat16, neighbours paired. `columns` is rounded up.
inline void round_rows(const Matrix<float>& from, int64_t rows, int64_t columns, const Matrix<uint32_t>& to) {
  for (int64_t row = 0; row < rows; ++row) {
    uint16_t* const line = reinterpret_cast<uint16_t*>(to.row(row));
    for (int64_t i = 0; i < columns; i += kLanes) {
      const Words rounded = round_to_bfloat16(load<Floats>(from.row(row) + i));
      store(line + i, __builtin_convertvector(rounded >> 16, Halves));
    }
  }
}

// A row of results, rounded once, or first added to what is there.
inline void write_row(const float* from, int64_t size, bool accumulate, float* to) {
  for (int64_t i = 0; i < size; ++i) {
    to[i] = accumulate ? to[i] + from[i] : from[i];
  }
}

inline void write_row(const float* from, int64_t size, bool accumulate, uint16_t* to) {
  for (int64_t i = 0; i < size; ++i) {
    to[i] = narrow(accumulate ? widen(to[i]) + from[i] : from[i]);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
