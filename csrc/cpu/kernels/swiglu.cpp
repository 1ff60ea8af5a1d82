// SwiGLU (Shazeer 2020): every number is read once and written once.
#include "swiglu.h"

#include "elements.h"
#include "exponential.h"

namespace paracore {
namespace CPU_CAPABILITY {
namespace {

// Vectors whose exponentials are taken together.
constexpr int kTogether = 4;

// Calls body(row, first column, columns) for each row's part of the elements [begin, end).
template <typename Body>
inline void for_each_row(int64_t size, int64_t begin, int64_t end, const Body& body) {
  while (begin < end) {
    const int64_t row = begin / size, column = begin % size;
    const int64_t columns = std::min(size - column, end - begin);
    body(row, column, columns);
    begin += columns;
  }
}

}  // namespace

template <typename T>
void swiglu_forward(const SwiGLUForward<T>& args, int64_t begin, int64_t end) {
  for_each_row(args.size, begin, end, [&](int64_t row, int64_t column, int64_t columns) {
    const T* const gate = args.gate + row * args.gate_stride + column;
    const T* const up = args.up + row * args.up_stride + column;
    T* const y = args.y + row * args.size + column;
    for_each_vectors<kTogether>(columns, [=](int64_t i, auto vectors, auto count) {
      Floats g[vectors];
      for (int v = 0; v < vectors; ++v) {
        g[v] = read(gate + i + v * kLanes, count);
      }
      const Sigmoid s(g);
      for (int v = 0; v < vectors; ++v) {
        const int64_t at = i + v * kLanes;
        write(y + at, g[v] * s.of[v] * read(up + at, count), count);
      }
    });
  });
}

// With s = sigmoid(gate):  dgate = dy * up * s * (1 + gate * (1 - s)),  dup = dy * gate * s.
template <typename T>
void swiglu_backward(const SwiGLUBackward<T>& args, int64_t begin, int64_t end) {
  for_each_row(args.size, begin, end, [&](int64_t row, int64_t column, int64_t columns) {
    const T* const dy = args.dy + row * args.dy_stride + column;
    const T* const gate = args.gate + row * args.gate_stride + column;
    const T* const up = args.up + row * args.up_stride + column;
    T* const dgate = args.dgate + row * args.size + column;
    T* const dup = args.dup + row * args.size + column;
    for_each_vectors<kTogether>(columns, [=](int64_t i, auto vectors, auto count) {
      Floats g[vectors];
      for (int v = 0; v < vectors; ++v) {
        g[v] = read(gate + i + v * kLanes, count);
      }
      const Sigmoid s(g);
      for (int v = 0; v < vectors; ++v) {
        const int64_t at = i + v * kLanes;
        const Floats d = read(dy + at, count), u = read(up + at, count);
        const Floats slope = multiply_add(g[v], s.of_negative[v], fill(1.f));
        write(dgate + at, d * u * s.of[v] * slope, count);
        write(dup + at, d * g[v] * s.of[v], count);
      }
    });
  });
}

template void swiglu_forward<float>(const SwiGLUForward<float>&, int64_t, int64_t);
template void swiglu_forward<uint16_t>(const SwiGLUForward<uint16_t>&, int64_t, int64_t);
template void swiglu_backward<float>(const SwiGLUBackward<float>&, int64_t, int64_t);
template void swiglu_backward<uint16_t>(const SwiGLUBackward<uint16_t>&, int64_t, int64_t);

}  // namespace CPU_CAPABILITY
}  // namespace paracore
