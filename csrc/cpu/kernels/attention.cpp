// The kernels of attention.h, for every processor; see attention_forward.h and attention_backward.h.
#include "attention.h"

#include "attention_backward.h"
#include "attention_forward.h"
#include "attention_instantiate.h"

namespace paracore {
namespace CPU_CAPABILITY {

template <typename T>
void attention_finish(const AttentionForward<T>& args, int64_t batch, int64_t head, int64_t begin, int64_t end) {
  const int64_t size = args.shape.value_dim;
  float acc[kMaxHeadDim];
  for (int64_t row = begin; row < end; ++row) {
    copy_row(args.acc.at(batch, head, row), size, acc);
    *args.lse.at(batch, head, row) = finish_row(
        *args.row_max.at(batch, head, row), *args.row_sum.at(batch, head, row), acc, size,
        args.out.at(batch, head, row));
  }
}

template <typename T>
void attention_delta(
    const Rows<const T>& out, const Rows<const T>& dout, int64_t value_dim, int64_t batch, int64_t head,
    int64_t begin, int64_t end, float* delta) {
  alignas(64) float a[kMaxHeadDim], b[kMaxHeadDim];
  const int64_t padded = round_up(value_dim, kLanes);
  std::fill(a, a + padded, 0.f);
  std::fill(b, b + padded, 0.f);
  for (int64_t row = begin; row < end; ++row) {
    copy_row(out.at(batch, head, row), value_dim, a);
    copy_row(dout.at(batch, head, row), value_dim, b);
    Floats sums{};
    for (int64_t i = 0; i < padded; i += kLanes) {
      sums = multiply_add(load<Floats>(a + i), load<Floats>(b + i), sums);
    }
    float total = 0.f;
    for (int lane = 0; lane < kLanes; ++lane) {
      total += sums[lane];
    }
    delta[row] = total;
  }
}

template void attention_finish<float>(const AttentionForward<float>&, int64_t, int64_t, int64_t, int64_t);
template void attention_finish<uint16_t>(const AttentionForward<uint16_t>&, int64_t, int64_t, int64_t, int64_t);
template void attention_delta<float>(
    const Rows<const float>&, const Rows<const float>&, int64_t, int64_t, int64_t, int64_t, int64_t, float*);
template void attention_delta<uint16_t>(
    const Rows<const uint16_t>&, const Rows<const uint16_t>&, int64_t, int64_t, int64_t, int64_t, int64_t, float*);

PARACORE_INSTANTIATE_SCRATCH(Products::kFloat32)
PARACORE_INSTANTIATE_SCRATCH(Products::kPairs)
PARACORE_INSTANTIATE_ATTENTION(float, Products::kFloat32)
PARACORE_INSTANTIATE_ATTENTION(uint16_t, Products::kFloat32)
PARACORE_INSTANTIATE_ATTENTION(uint16_t, Products::kPairs)

}  // namespace CPU_CAPABILITY
}  // namespace paracore
