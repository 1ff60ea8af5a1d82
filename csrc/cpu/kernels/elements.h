// Rows of float32 numbers, or of bfloat16 ones as bits, walked a vector at a time and computed in float32.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "vector.h"

namespace paracore {
namespace CPU_CAPABILITY {

// The number of elements of a vector, where it is known to be whole.
using Whole = std::integral_constant<int64_t, kLanes>;

// Calls body(offset, count) for every vector of a row. `count` is Whole, and in the last, partial one a number below
// kLanes: the body is compiled for both, and gives an element the same bits in either.
template <typename Body>
inline void for_each_vector(int64_t size, const Body& body) {
  int64_t offset = 0;
  for (; offset + kLanes <= size; offset += kLanes) {
    body(offset, Whole{});
  }
  if (offset < size) {
    body(offset, size - offset);
  }
}

template <int count>
using Vectors = std::integral_constant<int, count>;

// The same for several vectors at once: body(offset, vectors, count), with Vectors<together> as long as there are as
// many, then with Vectors<1>.
template <int together, typename Body>
inline void for_each_vectors(int64_t size, const Body& body) {
  constexpr int64_t kStep = together * kLanes;
  int64_t begin = 0;
  for (; begin + kStep <= size; begin += kStep) {
    body(begin, Vectors<together>{}, Whole{});
  }
  for_each_vector(size - begin, [=](int64_t i, auto count) { body(begin + i, Vectors<1>{}, count); });
}

inline Floats read(const float* from, Whole /*count*/) {
  return load<Floats>(from);
}

inline Floats read(const uint16_t* from, Whole /*count*/) {
  return (Floats)(widen_halves(load<Halves>(from)) << 16);
}

inline void write(float* to, const Floats& values, Whole /*count*/) {
  store(to, values);
}

inline void write(uint16_t* to, const Floats& values, Whole /*count*/) {
  store(to, upper_halves(round_to_bfloat16(values)));
}

// The partial vector: what lies beyond `count` reads as zero and is not written.
template <typename T>
inline Floats read(const T* from, int64_t count) {
  T buffer[kLanes] = {};
  std::copy_n(from, count, buffer);
  return read(buffer, Whole{});
}

template <typename T>
inline void write(T* to, const Floats& values, int64_t count) {
  T buffer[kLanes];
  write(buffer, values, Whole{});
  std::copy_n(buffer, count, to);
}

// All bits of the first `count` lanes, none of the others.
inline Words first_lanes(Whole /*count*/) {
  return ~Words{};
}

inline Words first_lanes(int64_t count) {
  Integers lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = lane < count ? -1 : 0;
  }
  return (Words)lanes;
}

inline float widen(float value) {
  return value;
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
