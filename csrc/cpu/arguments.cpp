#include "arguments.h"

namespace paracore {

void check_tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() && tensor.scalar_type() == dtype && tensor.sizes() == sizes, name, " is ",
      tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device(), ", must be ", dtype, " ", sizes,
      " on the CPU");
}

void check_rows(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  check_tensor(tensor, name, dtype, sizes);
  TORCH_CHECK_VALUE(
      tensor.size(-1) <= 1 || tensor.stride(-1) == 1, name, " of shape ", tensor.sizes(), " has strides ",
      tensor.strides(), "; its last dim must be contiguous");
}

void check_written(const at::Tensor& tensor, const char* name) {
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    TORCH_CHECK_VALUE(
        tensor.size(dim) <= 1 || tensor.stride(dim) != 0, name, " of shape ", tensor.sizes(), " has strides ",
        tensor.strides(), "; what is written must not be expanded");
  }
}

void check_wide_or_narrow(const at::Tensor& tensor, const char* name, int64_t dims) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kBFloat16, name, " is ", dtype, ", must be float32 or bfloat16");
  TORCH_CHECK_VALUE(tensor.dim() == dims, name, " has shape ", tensor.sizes(), ", must have ", dims, " dims");
  check_rows(tensor, name, dtype, tensor.sizes());
}

}  // namespace paracore
