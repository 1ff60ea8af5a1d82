// RMSNorm (Zhang & Sennrich 2019), one row at a time so that the second walk finds the row in cache.
#include "rms_norm.h"

#include <c10/util/BFloat16.h>

#include <cmath>

#include "row.h"

namespace paracore {
namespace CPU_CAPABILITY {
namespace {

// h = x + residual rounded to T, and the sum of squares of the rounded h.
template <typename T>
inline float add_and_sum_squares(const T* x, const T* residual, T* h, int64_t hidden) {
  return sum_over_row(hidden, [&](int64_t i, auto count, const Step& squares) {
    store(h + i, load(x + i, count) + load(residual + i, count), count);
    const Step rounded = load(h + i, count);
    return multiply_add(rounded, rounded, squares);
  });
}

template <typename T>
inline float sum_squares(const T* h, int64_t hidden) {
  return sum_over_row(hidden, [&](int64_t i, auto count, const Step& squares) {
    const Step values = load(h + i, count);
    return multiply_add(values, values, squares);
  });
}

}  // namespace

template <typename T>
void rms_norm_forward(const RMSNormForward<T>& args, int64_t begin, int64_t end) {
  const int64_t hidden = args.hidden;
  for (int64_t row = begin; row < end; ++row) {
    const T* h = args.x + row * args.x_stride;
    float squares;
    if (args.residual == nullptr) {
      squares = sum_squares(h, hidden);
    } else {
      T* const total = args.h + row * hidden;
      squares = add_and_sum_squares(h, args.residual + row * args.residual_stride, total, hidden);
      h = total;
    }
    const float rstd = 1.f / std::sqrt(squares / static_cast<float>(hidden) + args.eps);
    args.rstd[row] = rstd;
    T* const y = args.y + row * hidden;
    const Step scale = fill(rstd);
    // What the next row needs is on its way while this one is computed.
    const T* const next_x = args.x + (row + 1) * args.x_stride;
    const float* const weight = args.weight;
    for_each_step(hidden, [=](int64_t i, auto count) {
      prefetch(next_x + i);
      prefetch(y + hidden + i);
      store(y + i, load(h + i, count) * scale * load(weight + i, count), count);
    });
  }
}

// With g = dy * weight and n = h * rstd:  dx = rstd * (g - n * mean(g * n)) + dh,  dweight = sum(dy * n).
template <typename T>
void rms_norm_backward(const RMSNormBackward<T>& args, int64_t begin, int64_t end, float* dweight) {
  const int64_t hidden = args.hidden;
  std::fill_n(dweight, hidden, 0.f);
  for (int64_t row = begin; row < end; ++row) {
    const T* const dy = args.dy + row * args.dy_stride;
    const T* const dh = args.dh == nullptr ? nullptr : args.dh + row * args.dh_stride;
    const T* const h = args.h + row * args.h_stride;
    T* const dx = args.dx + row * hidden;
    const Step rstd = fill(args.rstd[row]);

    const float products = sum_over_row(hidden, [&](int64_t i, auto count, const Step& sum) {  // of g * n
      const Step dweight_row = load(dy + i, count) * (load(h + i, count) * rstd);
      store(dweight + i, load(dweight + i, count) + dweight_row, count);
      return multiply_add(dweight_row, load(args.weight + i, count), sum);
    });
    const Step mean = fill(products / static_cast<float>(hidden) * args.rstd[row]);

    const auto gradient = [&](int64_t i, auto count) {
      const Step g = load(dy + i, count) * load(args.weight + i, count);
      return (g - load(h + i, count) * mean) * rstd;
    };
    if (dh == nullptr) {
      for_each_step(hidden, [&](int64_t i, auto count) { store(dx + i, gradient(i, count), count); });
    } else {
      for_each_step(hidden, [&](int64_t i, auto count) {
        store(dx + i, gradient(i, count) + load(dh + i, count), count);
      });
    }
  }
}

template <typename W>
void sum_rows(const float* from, int64_t rows, int64_t columns, int64_t begin, int64_t end, W* to) {
  for_each_step(end - begin, [&](int64_t i, auto count) {
    Step total = fill(0.f);
    for (int64_t row = 0; row < rows; ++row) {
      total = total + load(from + row * columns + begin + i, count);
    }
    store(to + begin + i, total, count);
  });
}

template void rms_norm_forward<float>(const RMSNormForward<float>&, int64_t, int64_t);
template void rms_norm_forward<c10::BFloat16>(const RMSNormForward<c10::BFloat16>&, int64_t, int64_t);
template void rms_norm_backward<float>(const RMSNormBackward<float>&, int64_t, int64_t, float*);
template void rms_norm_backward<c10::BFloat16>(const RMSNormBackward<c10::BFloat16>&, int64_t, int64_t, float*);
template void sum_rows<float>(const float*, int64_t, int64_t, int64_t, int64_t, float*);
template void sum_rows<c10::BFloat16>(const float*, int64_t, int64_t, int64_t, int64_t, c10::BFloat16*);

}  // namespace CPU_CAPABILITY
}  // namespace paracore
