// Products of small matrices in scratch memory, a block of registers at a time.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include "attention.h"
#include "vector.h"

namespace paracore {
namespace CPU_CAPABILITY {

// Matrices are multiplied in words along the dim that is summed: a float32 number, or two bfloat16 numbers, the
// one of lower index in the lower half.
template <Products kProducts>
struct Multiplier {
  using Word = uint32_t;
  static constexpr int kNumbers = 2;  // in a word

  // c + a * b, the upper numbers first, as the instruction does.
  static Floats add_product(const Word* a, const Words& b, const Floats& c) {
    const Words pair = fill(*a);
    const Floats upper = multiply_add((Floats)(pair & 0xffff0000u), (Floats)(b & 0xffff0000u), c);
    return multiply_add((Floats)(pair << 16), (Floats)(b << 16), upper);
  }
  using Vector = Words;
};

template <>
struct Multiplier<Products::kFloat32> {
  using Word = float;
  using Vector = Floats;
  static constexpr int kNumbers = 1;

  static Floats add_product(const Word* a, const Floats& b, const Floats& c) { return multiply_add(fill(*a), b, c); }
};

#ifdef __AVX512BF16__
template <>
struct Multiplier<Products::kPairInstruction> {
  using Word = uint32_t;
  using Vector = Words;
  static constexpr int kNumbers = 2;

  static Floats add_product(const Word* a, const Words& b, const Floats& c) {
    return (Floats)_mm512_dpbf16_ps((__m512)c, (__m512bh)fill(*a), (__m512bh)b);
  }
};
#endif

template <Products kProducts>
using Word = typename Multiplier<kProducts>::Word;

// A block of the result fills the registers: kBlockRows x 2 vectors, beside two of B and one of A.
#ifdef CPU_CAPABILITY_AVX512
constexpr int kBlockRows = 12;
#else
constexpr int kBlockRows = 6;
#endif
constexpr int kBlockColumns = 2 * kLanes;
static_assert(kAttentionTile % kBlockRows == 0 && kAttentionTile % kBlockColumns == 0);

// How A is walked: its rows lie a stride apart (as the rows of q), or side by side (as columns of weights).
enum class Walk { kRows, kColumns };
// What becomes of the result: it replaces C, is added to it, or to it times its row's factor.
enum class Into { kReplace, kAdd, kRescale };

template <typename T>
struct Matrix {
  T* data;
  int64_t stride;  // between rows; for A under Walk::kColumns, between columns

  T* row(int64_t index) const { return data + index * stride; }
};

template <Into kInto>
inline void put(const Floats& sum, float* c, const Floats& factor) {
  if constexpr (kInto == Into::kReplace) {
    store(c, sum);
  } else if constexpr (kInto == Into::kAdd) {
    store(c, load<Floats>(c) + sum);
  } else {
    store(c, multiply_add(load<Floats>(c), factor, sum));
  }
}

// Sums start at zero, whatever C holds: errors grow with the depth of a tile and the number of tiles, not with
// their product. The unrolling is spelled out because an array survives in registers only if every loop over it
// is gone early; not inlined, so that nothing around it takes registers.
template <Products kProducts, Walk kWalk, Into kInto, int kVectors>
__attribute__((noinline)) void multiply_block(
    const Word<kProducts>* a, int64_t a_stride, const Word<kProducts>* b, int64_t b_stride, int64_t depth, float* c,
    int64_t c_stride, const float* factors) {
  using Multiply = Multiplier<kProducts>;
  using Vector = typename Multiply::Vector;
  Floats sums[kBlockRows][kVectors];
  const Word<kProducts>* rows[kBlockRows];
#pragma GCC unroll 12
  for (int row = 0; row < kBlockRows; ++row) {
    rows[row] = kWalk == Walk::kRows ? a + row * a_stride : a + row;
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sums[row][v] = Floats{};
    }
  }
  const int64_t step = kWalk == Walk::kRows ? 1 : a_stride;
  for (int64_t k = 0; k < depth; ++k) {
    Vector columns[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      columns[v] = load<Vector>(b + k * b_stride + v * kLanes);
    }
#pragma GCC unroll 12
    for (int row = 0; row < kBlockRows; ++row) {
      const Word<kProducts>* const number = kWalk == Walk::kRows ? rows[row] + k : a + k * step + row;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        sums[row][v] = Multiply::add_product(number, columns[v], sums[row][v]);
      }
    }
  }
#pragma GCC unroll 12
  for (int row = 0; row < kBlockRows; ++row) {
    const Floats factor = kInto == Into::kRescale ? fill(factors[row]) : Floats{};
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      put<kInto>(sums[row][v], c + row * c_stride + v * kLanes, factor);
    }
  }
}

// C [rows, columns] from A [rows, depth] and B [depth, columns], the depth in words. Whole blocks are computed:
// memory must be there up to the next multiple of kBlockRows rows and of kLanes columns.
template <Products kProducts, Walk kWalk, Into kInto>
inline void multiply(
    const Matrix<Word<kProducts>>& a, const Matrix<Word<kProducts>>& b, const Matrix<float>& c, int64_t rows,
    int64_t columns, int64_t depth, const float* factors = nullptr) {
  for (int64_t column = 0; column < columns; column += kBlockColumns) {
    const auto block = columns - column > kLanes ? &multiply_block<kProducts, kWalk, kInto, 2>
                                                 : &multiply_block<kProducts, kWalk, kInto, 1>;
    for (int64_t row = 0; row < rows; row += kBlockRows) {
      const Word<kProducts>* const a_row = kWalk == Walk::kRows ? a.row(row) : a.data + row;
      block(
          a_row, a.stride, b.data + column, b.stride, depth, c.row(row) + column, c.stride,
          kInto == Into::kRescale ? factors + row : nullptr);
    }
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
