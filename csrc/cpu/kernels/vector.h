// Vectors as wide as the capability's registers, of float32 numbers or of 32-bit words.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY. The compiler's own vector types,
// not at::vec: the accumulators of a matrix product must stay in registers in every variant.
#pragma once

#ifdef PARACORE_X86_VARIANTS
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

namespace paracore {
namespace CPU_CAPABILITY {

#if defined(CPU_CAPABILITY_AVX512)
constexpr int kLanes = 16;
#elif defined(CPU_CAPABILITY_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));  // bfloat16 numbers, as bits

// At any address, of any type.
template <typename Vector>
inline Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <typename Vector>
inline void store(void* to, const Vector& vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

// By a subtraction, which the compiler drops; adding zero would change -0.
inline Floats fill(float value) {
  return value - Floats{};
}

inline Words fill(uint32_t value) {
  return value - Words{};
}

inline Integers fill(int32_t value) {
  return value - Integers{};
}

// a * b + c, rounded once where the processor can. Sources here are compiled with -ffp-contract=off, so that
// nothing else is fused: two copies of one formula must give the same bits.
inline Floats multiply_add(const Floats& a, const Floats& b, const Floats& c) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(CPU_CAPABILITY_AVX2)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// The larger of each lane; b where either is not a number.
inline Floats larger(const Floats& a, const Floats& b) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(CPU_CAPABILITY_AVX2)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

// The smaller of each lane; b where either is not a number.
inline Floats smaller(const Floats& a, const Floats& b) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(CPU_CAPABILITY_AVX2)
  return (Floats)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// Rounded as IEEE 754 asks, in every variant.
inline Floats square_root(const Floats& a) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Floats)_mm512_sqrt_ps((__m512)a);
#elif defined(CPU_CAPABILITY_AVX2)
  return (Floats)_mm256_sqrt_ps((__m256)a);
#elif defined(PARACORE_X86_VARIANTS)
  return (Floats)_mm_sqrt_ps((__m128)a);
#elif defined(__aarch64__)
  return (Floats)vsqrtq_f32((float32x4_t)a);
#else
  Floats root;
  for (int lane = 0; lane < kLanes; ++lane) {
    root[lane] = __builtin_sqrtf(a[lane]);
  }
  return root;
#endif
}

inline Floats magnitude(const Floats& a) {
  return (Floats)((Words)a & 0x7fffffffu);
}

// bfloat16 is the upper half of a float32. Rounded to nearest, ties to even, as torch does; the upper half of
// each lane is the result and the lower half is zero.
inline Words round_to_bfloat16(const Floats& value) {
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
  return value == value ? rounded : fill(0x7fc00000u);
}

// What the compiler makes of a conversion between vectors takes several instructions; these take one or three.
inline Words widen_halves(const Halves& values) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Words)_mm512_cvtepu16_epi32((__m256i)values);
#elif defined(CPU_CAPABILITY_AVX2)
  return (Words)_mm256_cvtepu16_epi32((__m128i)values);
#else
  return __builtin_convertvector(values, Words);
#endif
}

inline Halves upper_halves(const Words& values) {
#if defined(CPU_CAPABILITY_AVX512)
  return (Halves)_mm512_cvtepi32_epi16((__m512i)(values >> 16));
#elif defined(CPU_CAPABILITY_AVX2)
  const __m256i upper = (__m256i)(values >> 16);
  return (Halves)_mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
#else
  return __builtin_convertvector(values >> 16, Halves);
#endif
}

inline float widen(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

inline uint16_t narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return value == value ? static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : uint16_t{0x7fc0};
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
