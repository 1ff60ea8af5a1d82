// Checks tensors and deals tokens out to threads; the mathematics is in kernels/cross_entropy.cpp.
#include "cross_entropy.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "arguments.h"
#include "kernels/cross_entropy.h"

namespace paracore {
namespace {

int64_t tokens_per_task(int64_t size) {
  return std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, size));
}

void check_logits_and_labels(const at::Tensor& logits, const at::Tensor& labels) {
  check_wide_or_narrow(logits, "logits", 2);
  check_rows(labels, "labels", at::kLong, {logits.size(0)});
}

}  // namespace

at::Tensor cross_entropy_statistics(
    const at::Tensor& logits, const at::Tensor& labels, const std::optional<std::string>& capability) {
  check_logits_and_labels(logits, labels);
  const Capability variant = choose_capability(capability);
  const int64_t tokens = logits.size(0), size = logits.size(1);
  const at::Tensor statistics = at::empty({4, tokens}, logits.options().dtype(at::kFloat));
  dispatch_wide_or_narrow(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const CrossEntropyStatistics<T> args{
        read_from<T>(logits), read_from<int64_t>(labels), written_to<float>(statistics), tokens, size,
        logits.stride(0)};
    const auto kernel = PARACORE_VARIANT(variant, cross_entropy_statistics<T>);
    at::parallel_for(
        0, tokens, tokens_per_task(size), [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
  return statistics;
}

void cross_entropy_gradient(
    const at::Tensor& logits,
    const at::Tensor& labels,
    const at::Tensor& maximum,
    const at::Tensor& log_sum,
    const at::Tensor& coefficients,
    const at::Tensor& dlogits,
    const std::optional<std::string>& capability) {
  check_logits_and_labels(logits, labels);
  const int64_t tokens = logits.size(0), size = logits.size(1);
  check_rows(maximum, "maximum", at::kFloat, {tokens});
  check_rows(log_sum, "log_sum", at::kFloat, {tokens});
  check_tensor(coefficients, "coefficients", at::kFloat, {3, tokens});
  TORCH_CHECK_VALUE(
      coefficients.is_contiguous(), "coefficients has strides ", coefficients.strides(), ", must be contiguous");
  check_rows(dlogits, "dlogits", logits.scalar_type(), logits.sizes());
  check_written(dlogits, "dlogits");
  const Capability variant = choose_capability(capability);
  dispatch_wide_or_narrow(logits, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const CrossEntropyGradient<T> args{
        read_from<T>(logits),
        read_from<int64_t>(labels),
        read_from<float>(maximum),
        read_from<float>(log_sum),
        read_from<float>(coefficients),
        written_to<T>(dlogits),
        tokens,
        size,
        logits.stride(0),
        dlogits.stride(0)};
    const auto kernel = PARACORE_VARIANT(variant, cross_entropy_gradient<T>);
    at::parallel_for(
        0, tokens, tokens_per_task(size), [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
  });
}

}  // namespace paracore
