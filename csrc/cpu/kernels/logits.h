// What happens to one vector of products q k^T before and after the exponential: scale, softcap, ALiBi, mask, dropout.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include <algorithm>
#include <limits>

#include "attention.h"
#include "exponential.h"
#include "philox.h"

namespace paracore {
namespace CPU_CAPABILITY {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// One float32 number on the way to base 2 and back, so that a row's largest logit, as lse, makes the same round trip.
constexpr float kLog2E = 1.44269504f;

// The terms of one head. They are plain if a logit is the product times a positive factor: products
// then stay as they are in memory, and -inf among them hides one as it hides a logit.
struct HeadTerms {
  bool plain, capped, sloped, dropout;
  float scale;
  float to_cap, cap;  // scale / softcap, softcap
  float slope;        // ALiBi's
  float kept_factor;
  uint32_t drop_below, head, batch, seed_low, seed_high;
};

inline HeadTerms head_terms(const LogitTerms& terms, int64_t batch, int64_t head) {
  HeadTerms result{};
  result.capped = terms.softcap > 0;
  result.sloped = terms.slopes != nullptr;
  result.dropout = terms.dropout;
  result.scale = static_cast<float>(terms.scale);
  result.plain = !result.capped && !result.sloped && result.scale > 0;
  if (result.capped) {
    result.to_cap = static_cast<float>(terms.scale / terms.softcap);
    result.cap = static_cast<float>(terms.softcap);
  }
  if (result.sloped) {
    result.slope = terms.slopes[batch * terms.slope_batch_stride + head];
  }
  result.kept_factor = terms.kept_factor;
  result.drop_below = terms.drop_below;
  result.head = terms.first_head + static_cast<uint32_t>(head);
  result.batch = terms.first_batch + static_cast<uint32_t>(batch);
  result.seed_low = terms.seed_low;
  result.seed_high = terms.seed_high;
  return result;
}

// Which queries and keys a vector's lanes stand for: global positions, zero where no term needs them.
struct Lanes {
  Integers query, key;
};

// The logit in base 2, and in `derivative` that of the softcap.
inline Floats logit(const HeadTerms& terms, const Floats& product, const Lanes& at, Floats& derivative) {
  Floats result = product * terms.scale;
  if (terms.capped) {
    const Floats capped = tanh(product * terms.to_cap);
    derivative = (1.f - capped) * (1.f + capped);
    result = capped * terms.cap;
  }
  if (terms.sloped) {
    const Integers difference = at.query - at.key;
    const Integers distance = difference < 0 ? -difference : difference;
    result = result - __builtin_convertvector(distance, Floats) * terms.slope;
  }
  return result * kLog2E;
}

// The value where its weight is kept, divided by the probability of that; else 0.
inline Floats drop(const HeadTerms& terms, const Floats& value, const Lanes& at) {
  const Words head = fill(terms.head), batch = fill(terms.batch);
  const Words random = philox((Words)at.key, (Words)at.query, head, batch, terms.seed_low, terms.seed_high);
  return random >= terms.drop_below ? value * terms.kept_factor : Floats{};
}

// The keys [begin, end) that some of a few neighbouring queries see, in indices into a tile; empty if none do.
struct KeySpan {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
};

// first and end of the queries of a tile, and which of the tile's keys they see.
inline KeySpan seen_keys(const int32_t* first, const int32_t* end, int64_t queries, int64_t key_begin, int64_t keys) {
  KeySpan span{keys, 0};
  for (int64_t query = 0; query < queries; ++query) {
    const int64_t low = std::max<int64_t>(first[query] - key_begin, 0);
    const int64_t high = std::min<int64_t>(end[query] - key_begin, keys);
    if (low < high) {
      span.begin = std::min(span.begin, low);
      span.end = std::max(span.end, high);
    }
  }
  return span;
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
