// Philox4x32-10 (Salmon et al. 2011), a vector of counters at a time; the same bits as paracore/counter_random.py.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include "vector.h"

namespace paracore {
namespace CPU_CAPABILITY {

typedef uint64_t LongWords __attribute__((vector_size(4 * kLanes)));

// The products of the lower word of each pair, for which every processor has an instruction; from the plain
// operation on vectors the compiler makes a 64-bit multiplication, which takes several.
inline LongWords multiply_lower(const LongWords& a, uint32_t b) {
#if defined(CPU_CAPABILITY_AVX512)
  return (LongWords)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi32(static_cast<int>(b)));
#elif defined(CPU_CAPABILITY_AVX2)
  return (LongWords)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi32(static_cast<int>(b)));
#elif defined(PARACORE_X86_VARIANTS)
  return (LongWords)_mm_mul_epu32((__m128i)a, _mm_set1_epi32(static_cast<int>(b)));
#elif defined(__aarch64__)
  return (LongWords)vmull_n_u32(vmovn_u64((uint64x2_t)a), b);
#else
  return (a & 0xffffffffu) * b;
#endif
}

struct LongProduct {
  Words high, low;
};

inline LongProduct multiply_long(const Words& a, uint32_t b) {
  const LongWords even = multiply_lower((LongWords)a, b), odd = multiply_lower((LongWords)a >> 32, b);
  return {(Words)((even >> 32) | (odd >> 32 << 32)), (Words)((even & 0xffffffffu) | (odd << 32))};
}

struct RandomWords {
  Words word[4];
};

// All four words for each counter.
inline RandomWords philox_words(Words c0, Words c1, Words c2, Words c3, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const LongProduct product0 = multiply_long(c0, 0xD2511F53u);
    const LongProduct product1 = multiply_long(c2, 0xCD9E8D57u);
    c0 = product1.high ^ c1 ^ key0;
    c2 = product0.high ^ c3 ^ key1;
    c1 = product1.low;
    c3 = product0.low;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// The first word for each counter. What only the others need is never computed: all of this is inlined.
inline Words philox(Words c0, Words c1, Words c2, Words c3, uint32_t key0, uint32_t key1) {
  return philox_words(c0, c1, c2, c3, key0, key1).word[0];
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
