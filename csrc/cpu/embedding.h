// An embedding's gradient on CPU tensors; the contract is paracore/reference_layers.py, what is refused is in
// paracore/_C.pyi.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace paracore {

// Bytes that embedding_gradient takes besides its result.
int64_t embedding_gradient_scratch(int64_t tokens, int64_t vocab_size);

at::Tensor embedding_gradient(
    const at::Tensor& dy,
    const at::Tensor& tokens,
    int64_t vocab_size,
    const std::optional<std::string>& capability);

}  // namespace paracore
