// Checks of tensors that several functions share. They throw ValueError, naming the argument.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace paracore {

// Fewer elements than this are not worth a thread of their own (ATen uses the same figure).
constexpr int64_t kElementsPerTask = 32768;

// A tensor of that dtype and shape on the CPU. Rows: its last dim is contiguous. Written: no element stands for two.
void check_tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes);
void check_rows(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes);
void check_written(const at::Tensor& tensor, const char* name);

// float32 or bfloat16, on the CPU, with that number of dims.
void check_wide_or_narrow(const at::Tensor& tensor, const char* name, int64_t dims);

// Calls body with a null pointer to what the kernels take a tensor's numbers for: float, or uint16_t for the bits of
// bfloat16 numbers.
template <typename Body>
void dispatch_wide_or_narrow(const at::Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == at::kFloat) {
    body(static_cast<float*>(nullptr));
  } else {
    body(static_cast<uint16_t*>(nullptr));
  }
}

template <typename T>
const T* read_from(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <typename T>
T* written_to(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace paracore
