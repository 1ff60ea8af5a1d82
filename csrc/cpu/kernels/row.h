// Rows of float32 or 16-bit numbers, walked in steps of a few vectors and computed in float32.
//
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <type_traits>

namespace paracore {
namespace CPU_CAPABILITY {

using Vec = at::vec::Vectorized<float>;

// Four independent vectors hide the latency of a fused multiply-add (4 cycles) in a sum.
constexpr int kVectors = 4;
constexpr int64_t kLanes = Vec::size();
constexpr int64_t kStep = kVectors * kLanes;
using Step = std::array<Vec, kVectors>;

// Calls body(offset, count) for every step of a row. `count` is a compile-time constant in the whole steps
// and a number below kStep in the last, partial one: the body is compiled for both.
template <typename Body>
inline void for_each_step(int64_t size, const Body& body) {
  int64_t offset = 0;
  for (; offset + kStep <= size; offset += kStep) {
    body(offset, std::integral_constant<int64_t, kStep>{});
  }
  if (offset < size) {
    body(offset, size - offset);
  }
}

inline Step fill(float value) {
  Step step;
  step.fill(Vec(value));
  return step;
}

template <typename T>
inline Step load(const T* from, std::integral_constant<int64_t, kStep> /*count*/) {
  Step step;
  if constexpr (std::is_same_v<T, float>) {
    for (int v = 0; v < kVectors; ++v) {
      step[v] = Vec::loadu(from + v * kLanes);
    }
  } else {
    for (int v = 0; v < kVectors; ++v) {
      at::vec::load_to_float<T>(from + v * kLanes, step[v]);
    }
  }
  return step;
}

template <typename T>
inline void store(T* to, const Step& step, std::integral_constant<int64_t, kStep> /*count*/) {
  if constexpr (std::is_same_v<T, float>) {
    for (int v = 0; v < kVectors; ++v) {
      step[v].store(to + v * kLanes);
    }
  } else {
    for (int v = 0; v < kVectors; v += 2) {
      at::vec::convert_from_float<T>(step[v], step[v + 1]).store(to + v * kLanes);
    }
  }
}

// Asks for the cache lines of a step, which may lie beyond the tensor: nothing is read.
template <typename T>
inline void prefetch(const T* from) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t i = 0; i < kStep; i += kLine) {
    __builtin_prefetch(from + i, 0, 2);
  }
}

// The partial step: what lies beyond `count` reads as zero and is not written.
template <typename T>
inline Step load(const T* from, int64_t count) {
  std::array<float, kStep> buffer{};
  std::copy_n(from, count, buffer.begin());
  return load(buffer.data(), std::integral_constant<int64_t, kStep>{});
}

template <typename T>
inline void store(T* to, const Step& step, int64_t count) {
  std::array<float, kStep> buffer;
  store(buffer.data(), step, std::integral_constant<int64_t, kStep>{});
  std::copy_n(buffer.begin(), count, to);
}

inline Step operator+(const Step& a, const Step& b) {
  Step sum;
  for (int v = 0; v < kVectors; ++v) {
    sum[v] = a[v] + b[v];
  }
  return sum;
}

inline Step operator-(const Step& a, const Step& b) {
  Step difference;
  for (int v = 0; v < kVectors; ++v) {
    difference[v] = a[v] - b[v];
  }
  return difference;
}

inline Step operator*(const Step& a, const Step& b) {
  Step product;
  for (int v = 0; v < kVectors; ++v) {
    product[v] = a[v] * b[v];
  }
  return product;
}

// a * b + c
inline Step multiply_add(const Step& a, const Step& b, const Step& c) {
  Step result;
  for (int v = 0; v < kVectors; ++v) {
    result[v] = at::vec::fmadd(a[v], b[v], c[v]);
  }
  return result;
}

// The sum of all lanes, always in the same order.
inline float sum(const Step& step) {
  static_assert(kVectors == 4);
  const Vec total = (step[0] + step[1]) + (step[2] + step[3]);
  return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, total);
}

// The sum over a row of what term(offset, count, sum) adds to `sum`. Long rows are summed in chunks, whose sums
// are then added: in one running sum, rounding errors would grow with the row.
template <typename Term>
inline float sum_over_row(int64_t size, const Term& term) {
  constexpr int64_t kChunk = 16 * kStep;
  Step total = fill(0.f);
  for (int64_t chunk = 0; chunk < size; chunk += kChunk) {
    Step part = fill(0.f);
    for_each_step(std::min(kChunk, size - chunk), [&](int64_t i, auto count) { part = term(chunk + i, count, part); });
    total = total + part;
  }
  return sum(total);
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
