// Memory for results that a kernel is about to write.
#pragma once

#include <ATen/core/Tensor.h>

namespace paracore {

// Has the system back a large tensor, not written to yet, by memory: in a few calls, on all threads, which takes about
// half as long as a fault for each of its pages does, and that longer than most kernels. Without effect but on Linux.
void prefault(const at::Tensor& tensor);

// An uninitialised contiguous tensor, backed so.
at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options);

}  // namespace paracore
