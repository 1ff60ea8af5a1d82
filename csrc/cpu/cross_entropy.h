// Cross entropy on CPU tensors; the contract is paracore/reference_layers.py, what is refused is in paracore/_C.pyi.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace paracore {

at::Tensor cross_entropy_statistics(
    const at::Tensor& logits, const at::Tensor& labels, const std::optional<std::string>& capability);

void cross_entropy_gradient(
    const at::Tensor& logits,
    const at::Tensor& labels,
    const at::Tensor& maximum,
    const at::Tensor& log_sum,
    const at::Tensor& coefficients,
    const at::Tensor& dlogits,
    const std::optional<std::string>& capability);

}  // namespace paracore
