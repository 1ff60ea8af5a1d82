// Checks tensors, allocates outputs, deals rows out to threads; the mathematics is in kernels/rms_norm.cpp.
#include "rms_norm.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "fresh.h"
#include "kernels/rms_norm.h"

namespace paracore {
namespace {

// The weight's gradient is summed within blocks of rows, then over the blocks. The blocks depend on the
// number of rows alone, so the order of additions, and every bit of the sum, is the same for any number of threads.
// As many blocks as keep every core of a large machine busy; not so many rows in one that rounding errors grow.
constexpr int64_t kBlocks = 128;
constexpr int64_t kMinRowsPerBlock = 4;
constexpr int64_t kMaxRowsPerBlock = 256;
// Fewer elements than this are not worth a thread of their own (ATen uses the same figure).
constexpr int64_t kElementsPerTask = 32768;
// Columns of the final sum that one thread takes at a time.
constexpr int64_t kColumns = 256;

void check_rows(const at::Tensor& tensor, const char* name, const at::Tensor& like) {
  TORCH_CHECK_VALUE(tensor.device().is_cpu(), name, " is on ", tensor.device(), ", must be on the CPU");
  TORCH_CHECK_VALUE(
      tensor.dim() == 2 && tensor.sizes() == like.sizes() && tensor.scalar_type() == like.scalar_type(),
      name, " is ", tensor.scalar_type(), " ", tensor.sizes(), ", must be [rows, hidden] as ",
      like.scalar_type(), " ", like.sizes());
  TORCH_CHECK_VALUE(
      tensor.size(1) >= 1 && (tensor.size(1) == 1 || tensor.stride(1) == 1),
      name, " of shape ", tensor.sizes(), " has strides ", tensor.strides(), "; its last dim must be contiguous");
}

void check_weight(const at::Tensor& weight, const at::Tensor& x) {
  TORCH_CHECK_VALUE(
      weight.device().is_cpu() && weight.dim() == 1 && weight.size(0) == x.size(1) && weight.is_contiguous(),
      "weight has shape ", weight.sizes(), " on ", weight.device(), ", must be a contiguous [", x.size(1),
      "] on the CPU");
}

at::Tensor output(const std::optional<at::Tensor>& out, const at::Tensor& like) {
  if (!out) {
    return fresh(like.sizes(), like.options());
  }
  check_rows(*out, "out", like);
  TORCH_CHECK_VALUE(out->is_contiguous(), "out has strides ", out->strides(), ", must be contiguous");
  return *out;
}

struct Blocks {
  int64_t rows_each, count;
};

Blocks blocks_of(int64_t rows) {
  const int64_t rows_each = std::clamp((rows + kBlocks - 1) / kBlocks, kMinRowsPerBlock, kMaxRowsPerBlock);
  return {rows_each, (rows + rows_each - 1) / rows_each};
}

int64_t rows_per_task(int64_t hidden) {
  return std::max<int64_t>(1, kElementsPerTask / hidden);
}

// Calls body with a null T* and W* of x's and weight's dtypes.
template <typename Body>
void dispatch_dtypes(const at::Tensor& x, const at::Tensor& weight, const Body& body) {
  const auto dtype = x.scalar_type(), weight_dtype = weight.scalar_type();
  using BFloat16 = c10::BFloat16;
  if (dtype == at::kFloat && weight_dtype == at::kFloat) {
    body(static_cast<float*>(nullptr), static_cast<float*>(nullptr));
  } else if (dtype == at::kBFloat16 && weight_dtype == at::kFloat) {
    body(static_cast<BFloat16*>(nullptr), static_cast<float*>(nullptr));
  } else if (dtype == at::kBFloat16 && weight_dtype == at::kBFloat16) {
    body(static_cast<BFloat16*>(nullptr), static_cast<BFloat16*>(nullptr));
  } else {
    TORCH_CHECK_VALUE(
        false, "x is ", dtype, " and weight ", weight_dtype,
        "; must be float32 or bfloat16 with a weight of float32 or the same dtype");
  }
}

}  // namespace

int64_t rms_norm_forward_scratch(int64_t hidden, at::ScalarType weight_dtype) {
  return weight_dtype == at::kFloat ? 0 : hidden * sizeof(float);  // wide_weight
}

int64_t rms_norm_backward_scratch(int64_t rows, int64_t hidden, at::ScalarType weight_dtype) {
  return rms_norm_forward_scratch(hidden, weight_dtype) + blocks_of(rows).count * hidden * sizeof(float);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> rms_norm_forward(
    const at::Tensor& x,
    const at::Tensor& weight,
    const std::optional<at::Tensor>& residual,
    double eps,
    const std::optional<at::Tensor>& out,
    const std::optional<std::string>& capability) {
  check_rows(x, "x", x);
  check_weight(weight, x);
  if (residual) {
    check_rows(*residual, "residual", x);
  }
  const int64_t rows = x.size(0), hidden = x.size(1);
  const Capability variant = choose_capability(capability);
  const at::Tensor y = output(out, x);
  const at::Tensor h = residual ? fresh(x.sizes(), x.options()) : x;
  const at::Tensor rstd = at::empty({rows}, x.options().dtype(at::kFloat));
  const at::Tensor wide_weight = weight.to(at::kFloat);  // once, and not in every row

  dispatch_dtypes(x, weight, [&](auto* t, auto*) {
    using T = std::remove_pointer_t<decltype(t)>;
    const RMSNormForward<T> args{
        x.const_data_ptr<T>(),
        residual ? residual->const_data_ptr<T>() : nullptr,
        wide_weight.const_data_ptr<float>(),
        y.mutable_data_ptr<T>(),
        residual ? h.mutable_data_ptr<T>() : nullptr,
        rstd.mutable_data_ptr<float>(),
        hidden,
        x.stride(0),
        residual ? residual->stride(0) : 0,
        static_cast<float>(eps)};
    const auto kernel = PARACORE_VARIANT(variant, rms_norm_forward<T>);
    at::parallel_for(0, rows, rows_per_task(hidden), [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
  return {y, h, rstd};
}

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(
    const at::Tensor& dy,
    const std::optional<at::Tensor>& dh,
    const at::Tensor& h,
    const at::Tensor& weight,
    const at::Tensor& rstd,
    const std::optional<at::Tensor>& out,
    const std::optional<std::string>& capability) {
  check_rows(h, "h", h);
  check_rows(dy, "dy", h);
  check_weight(weight, h);
  if (dh) {
    check_rows(*dh, "dh", h);
  }
  const int64_t rows = h.size(0), hidden = h.size(1);
  TORCH_CHECK_VALUE(
      rstd.scalar_type() == at::kFloat && rstd.dim() == 1 && rstd.size(0) == rows && rstd.is_contiguous(),
      "rstd is ", rstd.scalar_type(), " ", rstd.sizes(), ", must be a contiguous float32 [", rows, "]");
  const Capability variant = choose_capability(capability);
  const int64_t rows_per_block = blocks_of(rows).rows_each, blocks = blocks_of(rows).count;
  const at::Tensor dx = output(out, h);
  const at::Tensor partial = at::empty({blocks, hidden}, rstd.options());
  const at::Tensor dweight = at::empty_like(weight);
  const at::Tensor wide_weight = weight.to(at::kFloat);

  dispatch_dtypes(h, weight, [&](auto* t, auto* w) {
    using T = std::remove_pointer_t<decltype(t)>;
    using W = std::remove_pointer_t<decltype(w)>;
    const RMSNormBackward<T> args{
        dy.const_data_ptr<T>(),
        dh ? dh->const_data_ptr<T>() : nullptr,
        h.const_data_ptr<T>(),
        wide_weight.const_data_ptr<float>(),
        rstd.const_data_ptr<float>(),
        dx.mutable_data_ptr<T>(),
        hidden,
        dy.stride(0),
        dh ? dh->stride(0) : 0,
        h.stride(0)};
    float* const sums = partial.mutable_data_ptr<float>();
    const auto kernel = PARACORE_VARIANT(variant, rms_norm_backward<T>);
    const int64_t grain = (rows_per_task(hidden) + rows_per_block - 1) / rows_per_block;
    at::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        const int64_t first = block * rows_per_block;
        kernel(args, first, std::min(rows, first + rows_per_block), sums + block * hidden);
      }
    });
    const auto sum = PARACORE_VARIANT(variant, sum_rows<W>);
    const int64_t groups = (hidden + kColumns - 1) / kColumns;
    at::parallel_for(0, groups, 4, [&](int64_t begin, int64_t end) {
      sum(sums, blocks, hidden, begin * kColumns, std::min(hidden, end * kColumns), dweight.mutable_data_ptr<W>());
    });
  });
  return {dx, dweight};
}

}  // namespace paracore
