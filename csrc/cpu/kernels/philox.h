// Philox4x32-10 (Salmon et al. 2011), a vector of counters at a time; the same bits as paracore/counter_random.py.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include "vector.h"

namespace paracore {
namespace CPU_CAPABILITY {

typedef uint64_t LongWords __attribute__((vector_size(8 * kLanes)));

struct RandomWords {
  Words word[4];
};

// All four words for each counter.
inline RandomWords philox_words(Words c0, Words c1, Words c2, Words c3, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const LongWords product0 = __builtin_convertvector(c0, LongWords) * 0xD2511F53u;
    const LongWords product1 = __builtin_convertvector(c2, LongWords) * 0xCD9E8D57u;
    c0 = __builtin_convertvector(product1 >> 32, Words) ^ c1 ^ key0;
    c2 = __builtin_convertvector(product0 >> 32, Words) ^ c3 ^ key1;
    c1 = __builtin_convertvector(product1, Words);
    c3 = __builtin_convertvector(product0, Words);
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
