// Checks tensors and deals elements out to threads; the mathematics is in kernels/swiglu.cpp.
#include "swiglu.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <initializer_list>

#include "arguments.h"
#include "fresh.h"
#include "kernels/swiglu.h"

namespace paracore {
namespace {

void check_output(const at::Tensor& out, const char* name, const at::Tensor& like) {
  check_tensor(out, name, like.scalar_type(), like.sizes());
  TORCH_CHECK_VALUE(out.is_contiguous(), name, " has strides ", out.strides(), ", must be contiguous");
}

// The length of the rows to walk: where no input has gaps between its rows, all of them are one.
int64_t row_size(std::initializer_list<const at::Tensor*> inputs) {
  const at::Tensor& first = **inputs.begin();
  const bool whole = std::all_of(inputs.begin(), inputs.end(), [](auto* input) { return input->is_contiguous(); });
  return whole ? first.numel() : first.size(1);
}

}  // namespace

at::Tensor swiglu_forward(
    const at::Tensor& gate,
    const at::Tensor& up,
    const std::optional<at::Tensor>& out,
    const std::optional<std::string>& capability) {
  check_wide_or_narrow(gate, "gate", 2);
  check_rows(up, "up", gate.scalar_type(), gate.sizes());
  if (out) {
    check_output(*out, "out", gate);
  }
  const Capability variant = choose_capability(capability);
  const at::Tensor y = out ? *out : fresh(gate.sizes(), gate.options());
  dispatch_wide_or_narrow(gate, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const SwiGLUForward<T> args{
        read_from<T>(gate),      read_from<T>(up), written_to<T>(y), row_size({&gate, &up}), gate.stride(0),
        up.stride(0)};
    const auto kernel = PARACORE_VARIANT(variant, swiglu_forward<T>);
    at::parallel_for(
        0, gate.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
  return y;
}

std::tuple<at::Tensor, at::Tensor> swiglu_backward(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    const std::optional<std::tuple<at::Tensor, at::Tensor>>& out,
    const std::optional<std::string>& capability) {
  check_wide_or_narrow(gate, "gate", 2);
  check_rows(up, "up", gate.scalar_type(), gate.sizes());
  check_rows(dy, "dy", gate.scalar_type(), gate.sizes());
  if (out) {
    check_output(std::get<0>(*out), "out[0]", gate);
    check_output(std::get<1>(*out), "out[1]", gate);
  }
  const Capability variant = choose_capability(capability);
  const auto gradients = out ? *out : std::make_tuple(fresh(gate.sizes(), gate.options()), fresh(gate.sizes(), gate.options()));
  const auto& [dgate, dup] = gradients;
  dispatch_wide_or_narrow(gate, [&, &dgate = dgate, &dup = dup](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const SwiGLUBackward<T> args{
        read_from<T>(dy),
        read_from<T>(gate),
        read_from<T>(up),
        written_to<T>(dgate),
        written_to<T>(dup),
        row_size({&dy, &gate, &up}),
        dy.stride(0),
        gate.stride(0),
        up.stride(0)};
    const auto kernel = PARACORE_VARIANT(variant, swiglu_backward<T>);
    at::parallel_for(
        0, gate.numel(), kElementsPerTask, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
  return gradients;
}

}  // namespace paracore
