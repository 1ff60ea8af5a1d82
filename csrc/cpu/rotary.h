// Rotary embedding on CPU tensors; the contract is paracore/reference_layers.py, what is refused is in
// paracore/_C.pyi.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace paracore {

void rotate_pair(
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& cos,
    const at::Tensor& sin,
    const at::Tensor& positions,
    const at::Tensor& q_out,
    const at::Tensor& k_out,
    bool inverse,
    const std::optional<std::string>& capability);

}  // namespace paracore
