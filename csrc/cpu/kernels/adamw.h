// AdamW over pieces of flat memory, by pointers: what cpu/adamw.cpp launches and cpu/kernels/adamw.cpp computes.
#pragma once

#include <cstdint>

#include "../capability.h"

namespace paracore {

// Columns of a row of each table; the contract, paracore/reference_adamw.py, says what is in them.
constexpr int64_t kPieceColumns = 3;
constexpr int64_t kCoefficientColumns = 10;
constexpr int64_t kDrawColumns = 7;

enum class AdamWMaster { kNone, kFloat32, kRemainder };

// Pointers without types: the kernel tells the many combinations apart, once for a range of pieces. What is not
// wide, float32, is bfloat16; a remainder is int16.
struct AdamW {
  void* parameter;
  void* gradient;
  void* first_moment;
  void* second_moment;
  void* max_second_moment;  // or null
  void* master;             // null for kNone
  bool wide_parameter, wide_gradient, wide_moments;
  AdamWMaster master_kind;
  bool zero_gradient;
  float gradient_scale;
  const int64_t* pieces;       // [n, kPieceColumns]
  const double* coefficients;  // [segments, kCoefficientColumns]
  const int64_t* draws;        // [segments, kDrawColumns], or null to round to nearest
};

PARACORE_DECLARE_VARIANTS(
    // Takes the step for the pieces [begin, end).
    void adamw(const AdamW& args, int64_t begin, int64_t end);

    // sums[piece] for the pieces [begin, end).
    void sum_of_squares(
        const void* gradient, bool wide_gradient, const int64_t* pieces, int64_t begin, int64_t end, double* sums);)

}  // namespace paracore
