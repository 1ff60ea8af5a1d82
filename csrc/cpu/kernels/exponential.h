// exp2 and tanh of vectors, to about one unit in the last place of float32.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include "vector.h"

namespace paracore {
namespace CPU_CAPABILITY {

// 2^x = 2^n * 2^f with n the integer nearest to x and f in [-1/2, 1/2], where a polynomial gives 2^f.
// Exactly 1 at 0; 0 below -126; for x above 127 the result has no meaning.
inline Floats exp2(const Floats& x) {
  constexpr float kRound = 12582912.f;  // 1.5 * 2^23: a sum with it is rounded to an integer, held in its low bits
  const Floats shifted = x + kRound;
  const Floats fraction = x - (shifted - kRound);
  // Coefficients of least relative error (2.0e-9) with a constant term of exactly 1.
  Floats power = fill(1.5353361959569156e-4f);
  power = multiply_add(power, fraction, fill(1.3398875016719103e-3f));
  power = multiply_add(power, fraction, fill(9.61843691766262e-3f));
  power = multiply_add(power, fraction, fill(5.5503323674201965e-2f));
  power = multiply_add(power, fraction, fill(0.24022647738456726f));
  power = multiply_add(power, fraction, fill(0.6931471824645996f));
  power = multiply_add(power, fraction, fill(1.f));
  const Floats scaled = (Floats)((Words)power + ((Words)shifted << 23));  // adds n to the exponent
  return (Floats)((Words)scaled & ~(Words)(x < -126.f));  // what is not a number stays so
}

// Near 0, where 1 - 2 / (e^2x + 1) would cancel, an odd polynomial (Cephes: tanhf, Moshier 1992).
inline Floats tanh(const Floats& x) {
  const Floats size = magnitude(x), square = x * x;
  Floats polynomial = fill(-5.70498872745e-3f);
  polynomial = multiply_add(polynomial, square, fill(2.06390887954e-2f));
  polynomial = multiply_add(polynomial, square, fill(-5.37397155531e-2f));
  polynomial = multiply_add(polynomial, square, fill(1.33314422036e-1f));
  polynomial = multiply_add(polynomial, square, fill(-3.33332819422e-1f));
  const Floats near = multiply_add(polynomial * square, x, x);
  constexpr float kTwoLog2E = 2.885390081777927f;
  const Floats far = 1.f - 2.f / (exp2(size * kTwoLog2E > 64.f ? fill(64.f) : size * kTwoLog2E) + 1.f);
  const Floats signed_far = (Floats)((Words)far | ((Words)x & 0x80000000u));
  return size < 0.625f ? near : signed_far;
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
