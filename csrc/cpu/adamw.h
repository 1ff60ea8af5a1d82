// AdamW on flat CPU tensors; the contract is paracore/reference_adamw.py, what is refused is in paracore/_C.pyi.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace paracore {

void adamw_(
    const at::Tensor& parameter,
    const at::Tensor& gradient,
    const at::Tensor& first_moment,
    const at::Tensor& second_moment,
    const std::optional<at::Tensor>& max_second_moment,
    const std::optional<at::Tensor>& master,
    const at::Tensor& pieces,
    const at::Tensor& coefficients,
    const at::Tensor& gradient_scale,
    const std::optional<at::Tensor>& draws,
    bool zero_gradient,
    const std::optional<std::string>& capability);

at::Tensor sum_of_squares(
    const at::Tensor& gradient, const at::Tensor& pieces, const std::optional<std::string>& capability);

}  // namespace paracore
