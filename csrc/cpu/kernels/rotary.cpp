// Rotary embedding (Su et al. 2021) of queries and keys, token by token: the angles' rows, once read, serve all heads
// from the first cache.
#include "rotary.h"

#include "elements.h"

namespace paracore {
namespace CPU_CAPABILITY {
namespace {

// first * cos - second * sin and second * cos + first * sin. Both are read before either is written.
template <typename T>
inline void rotate_head(const T* from, T* to, const float* cos, const float* sin, int64_t half, uint32_t sign) {
  for_each_vector(half, [=](int64_t i, auto count) {
    const Floats first = read(from + i, count), second = read(from + half + i, count);
    const Floats c = read(cos + i, count), s = (Floats)((Words)read(sin + i, count) ^ sign);
    write(to + i, multiply_add(first, c, -(second * s)), count);
    write(to + half + i, multiply_add(second, c, first * s), count);
  });
}

template <typename T>
inline void rotate_heads(
    const RotatedHeads<T>& x, int64_t s, int64_t b, const float* cos, const float* sin, int64_t half, uint32_t sign) {
  const T* from = x.from + s * x.from_strides[0] + b * x.from_strides[1];
  T* to = x.to + s * x.to_strides[0] + b * x.to_strides[1];
  for (int64_t head = 0; head < x.heads; ++head, from += x.from_strides[2], to += x.to_strides[2]) {
    rotate_head(from, to, cos, sin, half, sign);
  }
}

}  // namespace

template <typename T>
void rotate_pair(const RotatePair<T>& args, int64_t begin, int64_t end) {
  const uint32_t sign = args.inverse ? 0x80000000u : 0;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t s = token / args.batch, b = token % args.batch;
    const int64_t row = args.positions[s * args.position_strides[0] + b * args.position_strides[1]];
    const float* const cos = args.cos + row * args.half;
    const float* const sin = args.sin + row * args.half;
    rotate_heads(args.q, s, b, cos, sin, args.half, sign);
    rotate_heads(args.k, s, b, cos, sin, args.half, sign);
  }
}

template void rotate_pair<float>(const RotatePair<float>&, int64_t, int64_t);
template void rotate_pair<uint16_t>(const RotatePair<uint16_t>&, int64_t, int64_t);

}  // namespace CPU_CAPABILITY
}  // namespace paracore
