// Checks tensors and deals tokens out to threads; the mathematics is in kernels/rotary.cpp.
#include "rotary.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "arguments.h"
#include "kernels/rotary.h"

namespace paracore {
namespace {

void check_table(const at::Tensor& table, const char* name, int64_t rows, int64_t half) {
  check_tensor(table, name, at::kFloat, {rows, half});
  TORCH_CHECK_VALUE(table.is_contiguous(), name, " has strides ", table.strides(), ", must be contiguous");
}

// Every position is a row of the tables: the kernel would read whatever lies there.
void check_positions(const at::Tensor& positions, int64_t rows, int64_t sequence, int64_t batch) {
  check_tensor(positions, "positions", at::kLong, {sequence, batch});
  const int64_t* const data = read_from<int64_t>(positions);
  const int64_t different = positions.stride(1) == 0 ? std::min<int64_t>(batch, 1) : batch;
  for (int64_t s = 0; s < sequence; ++s) {
    for (int64_t b = 0; b < different; ++b) {
      const int64_t position = data[s * positions.stride(0) + b * positions.stride(1)];
      TORCH_CHECK_VALUE(
          0 <= position && position < rows, "positions[", s, ", ", b, "] is ", position, ", must be one of the ",
          rows, " rows of cos and sin");
    }
  }
}

template <typename T>
RotatedHeads<T> heads_of(const at::Tensor& from, const at::Tensor& to) {
  return {
      read_from<T>(from),
      written_to<T>(to),
      from.size(2),
      {from.stride(0), from.stride(1), from.stride(2)},
      {to.stride(0), to.stride(1), to.stride(2)}};
}

}  // namespace

void rotate_pair(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& cos,
    const at::Tensor& sin,
    const at::Tensor& positions,
    const at::Tensor& q_out,
    const at::Tensor& k_out,
    bool inverse,
    const std::optional<std::string>& capability) {
  check_wide_or_narrow(q, "q", 4);
  TORCH_CHECK_VALUE(k.dim() == 4, "k has shape ", k.sizes(), ", must have 4 dims");
  const int64_t sequence = q.size(0), batch = q.size(1), dim = q.size(3);
  check_rows(k, "k", q.scalar_type(), {sequence, batch, k.size(2), dim});
  TORCH_CHECK_VALUE(dim % 2 == 0, "q has ", dim, " in its last dim, must be even: its halves are rotated as pairs");
  check_rows(q_out, "q_out", q.scalar_type(), q.sizes());
  check_rows(k_out, "k_out", q.scalar_type(), k.sizes());
  check_written(q_out, "q_out");
  check_written(k_out, "k_out");
  TORCH_CHECK_VALUE(cos.dim() == 2, "cos has shape ", cos.sizes(), ", must be [positions, ", dim / 2, "]");
  check_table(cos, "cos", cos.size(0), dim / 2);
  check_table(sin, "sin", cos.size(0), dim / 2);
  check_positions(positions, cos.size(0), sequence, batch);
  const Capability variant = choose_capability(capability);
  const int64_t elements_per_token = std::max<int64_t>(1, (q.size(2) + k.size(2)) * dim);
  dispatch_wide_or_narrow(q, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const RotatePair<T> args{
        heads_of<T>(q, q_out),
        heads_of<T>(k, k_out),
        read_from<float>(cos),
        read_from<float>(sin),
        read_from<int64_t>(positions),
        {positions.stride(0), positions.stride(1)},
        batch,
        dim / 2,
        inverse};
    const auto kernel = PARACORE_VARIANT(variant, rotate_pair<T>);
    const int64_t grain = std::max<int64_t>(1, kElementsPerTask / elements_per_token);
    at::parallel_for(
        0, sequence * batch, grain, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
}

}  // namespace paracore
