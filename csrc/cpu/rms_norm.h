// RMSNorm on CPU tensors; the contract is documented in paracore/_C.pyi.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <tuple>

namespace paracore {

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_forward(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& residual,
    double eps,
    const std::optional<at::Tensor>& out,
    const std::optional<std::string>& capability);

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& dy,
    const std::optional<at::Tensor>& dh,
    const at::Tensor& h,
    const at::Tensor& weight,
    const at::Tensor& rstd,
    const std::optional<at::Tensor>& out,
    const std::optional<std::string>& capability);

// Bytes that a call takes besides its arguments and results, and gives back.
int64_t rms_norm_forward_scratch(int64_t hidden, at::ScalarType weight_dtype);
int64_t rms_norm_backward_scratch(int64_t rows, int64_t hidden, at::ScalarType weight_dtype);

}  // namespace paracore
