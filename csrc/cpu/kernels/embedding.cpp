// The gradient of an embedding's weight: each row is the sum of its tokens' gradients, in their order, in float32.
#include "embedding.h"

#include "elements.h"

namespace paracore {
namespace CPU_CAPABILITY {

template <typename T>
void embedding_gradient(
    const EmbeddingGradient<T>& args, int64_t begin, int64_t end, int64_t column, int64_t columns) {
  alignas(64) float sum[kEmbeddingColumns];
  float* const sums = sum;
  for (int64_t row = begin; row < end; ++row) {
    T* const total = args.total + row * args.size + column;
    const int64_t first = args.begins[row], last = args.begins[row + 1];
    if (first == last) {
      std::fill_n(total, columns, T{});
      continue;
    }
    std::fill_n(sums, columns, 0.f);
    for (int64_t i = first; i < last; ++i) {
      const T* const dy = args.dy + args.order[i] * args.dy_stride + column;
      for_each_vector(columns, [=](int64_t j, auto count) {
        write(sums + j, read(sums + j, count) + read(dy + j, count), count);
      });
    }
    for_each_vector(columns, [=](int64_t j, auto count) { write(total + j, read(sums + j, count), count); });
  }
}

template void embedding_gradient<float>(const EmbeddingGradient<float>&, int64_t, int64_t, int64_t, int64_t);
template void embedding_gradient<uint16_t>(const EmbeddingGradient<uint16_t>&, int64_t, int64_t, int64_t, int64_t);

}  // namespace CPU_CAPABILITY
}  // namespace paracore
