// SwiGLU on CPU tensors; the contract is paracore/reference_layers.py, what is refused is in paracore/_C.pyi.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace paracore {

at::Tensor swiglu_forward(
    const at::Tensor& gate,
    const at::Tensor& up,
    const std::optional<at::Tensor>& out,
    const std::optional<std::string>& capability);

std::tuple<at::Tensor, at::Tensor> swiglu_backward(
    const at::Tensor& dy,
    const at::Tensor& gate,
    const at::Tensor& up,
    const std::optional<std::tuple<at::Tensor, at::Tensor>>& out,
    const std::optional<std::string>& capability);

}  // namespace paracore
