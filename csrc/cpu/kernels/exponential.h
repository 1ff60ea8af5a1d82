// exp2, exp, sigmoid and tanh of vectors, to about one unit in the last place of float32.
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

// e^x of several vectors, one operation at a time on all of them: the processor sees too few operations ahead to find
// independent ones in another vector's chain, and would wait for each.
//
// e^x = 2^n * e^r with n the integer nearest to x / ln 2 and r in [-ln 2 / 2, ln 2 / 2], where a polynomial gives
// e^r. Exactly 1 at 0; 0 below about 2^-126.5; not a number where x is not. Above 88.4 use exp.
template <int count>
inline void exp_up_to_88(const Floats (&x)[count], Floats (&result)[count]) {
  constexpr float kLog2E = 1.44269504f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // the first times an integer is exact
  // 1.5 * 2^23, as in exp2, and the bias of exponents: the sum's low bits are the exponent of 2^n.
  constexpr float kRound = 12583039.f;
  // Coefficients of least relative error (3.1e-9) with the first two exactly 1.
  constexpr float kCoefficients[] = {
      8.368716575205326e-3f, 4.166838899254799e-2f, 0.1666652113199234f, 0.4999999403953552f};
  Floats shifted[count], r[count], power[count];
  for (int v = 0; v < count; ++v) {
    r[v] = larger(fill(-88.f), x[v]);  // there n = -127, whose exponent is that of zero
    shifted[v] = multiply_add(r[v], fill(kLog2E), fill(kRound));
  }
  for (int v = 0; v < count; ++v) {
    const Floats n = shifted[v] - kRound;
    r[v] = multiply_add(n, fill(-kLn2Low), multiply_add(n, fill(-kLn2High), r[v]));
    power[v] = fill(1.381459878757596e-3f);
  }
#pragma GCC unroll 4
  for (const float coefficient : kCoefficients) {
    for (int v = 0; v < count; ++v) {
      power[v] = multiply_add(power[v], r[v], fill(coefficient));
    }
  }
  for (int v = 0; v < count; ++v) {
    result[v] = (multiply_add(power[v], r[v] * r[v], r[v]) + 1.f) * (Floats)((Words)shifted[v] << 23);
  }
}

// The same for any x: infinite above 88.4.
template <int count>
inline void exp(const Floats (&x)[count], Floats (&result)[count]) {
  Floats limited[count];
  for (int v = 0; v < count; ++v) {
    limited[v] = smaller(fill(88.5f), x[v]);  // there n = 128, whose exponent is that of infinity
  }
  exp_up_to_88(limited, result);
}

// 1 / (1 + e^-x) and 1 / (1 + e^x), each to full relative precision, by an exponential that cannot overflow.
template <int count>
struct Sigmoid {
  explicit Sigmoid(const Floats (&x)[count]) {
    Floats negative[count], power[count];
    for (int v = 0; v < count; ++v) {
      negative[v] = (Floats)((Words)x[v] | 0x80000000u);
    }
    exp_up_to_88(negative, power);
    for (int v = 0; v < count; ++v) {
      const Floats above_half = 1.f / (1.f + power[v]), below_half = power[v] * above_half;
      of[v] = x[v] < 0.f ? below_half : above_half;
      of_negative[v] = x[v] < 0.f ? above_half : below_half;
    }
  }

  Floats of[count], of_negative[count];
};

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
