#include "attention_arguments.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace paracore {
namespace {

at::Tensor check_positions(const std::optional<at::Tensor>& positions, const char* name, int64_t size) {
  TORCH_CHECK_VALUE(positions.has_value(), name, " is None; ALiBi and dropout need query_positions and key_positions");
  check_tensor(*positions, name, at::kInt, {size});
  return positions->contiguous();
}

// Terms may be given once for all batches.
at::Tensor check_per_batch(
    const at::Tensor& tensor, const char* name, at::ScalarType dtype, int64_t batches, int64_t size) {
  const bool fits = tensor.dim() == 2 && (tensor.size(0) == 1 || tensor.size(0) == batches) && tensor.size(1) == size;
  TORCH_CHECK_VALUE(
      fits && tensor.scalar_type() == dtype && tensor.device().is_cpu(), name, " is ", tensor.scalar_type(), " ",
      tensor.sizes(), " on ", tensor.device(), ", must be ", dtype, " [", batches, " or 1, ", size, "] on the CPU");
  return tensor.contiguous();
}

int64_t batch_stride(const at::Tensor& per_batch) {
  return per_batch.size(0) == 1 ? 0 : per_batch.size(1);
}

// By the queries that see something: the others want no key, but keep a tile from being seen by all.
TileRange range_of(const int32_t* first, const int32_t* end, int64_t queries, int64_t keys) {
  TileRange range{keys, 0, 0, keys};
  for (int64_t query = 0; query < queries; ++query) {
    const int64_t low = std::max<int64_t>(first[query], 0), high = std::min<int64_t>(end[query], keys);
    if (low < high) {
      range.low = std::min(range.low, low);
      range.high = std::max(range.high, high);
      range.all_low = std::max(range.all_low, low);
      range.all_high = std::min(range.all_high, high);
    } else {
      range.all_high = 0;
    }
  }
  return range;
}

std::vector<TileRange> tile_ranges(const at::Tensor& first, const at::Tensor& end, const AttentionShape& shape) {
  std::vector<TileRange> ranges;
  for (int64_t batch = 0; batch < std::max(first.size(0), end.size(0)); ++batch) {
    const int32_t* const firsts = first.const_data_ptr<int32_t>() + batch * batch_stride(first);
    const int32_t* const ends = end.const_data_ptr<int32_t>() + batch * batch_stride(end);
    for (int64_t query = 0; query < shape.queries; query += kAttentionTile) {
      const int64_t queries = std::min(kAttentionTile, shape.queries - query);
      ranges.push_back(range_of(firsts + query, ends + query, queries, shape.keys));
    }
  }
  return ranges;
}

bool has_pair_instruction(Capability capability) {
#ifdef PARACORE_X86_VARIANTS
  return capability == Capability::kAvx512 && __builtin_cpu_supports("avx512bf16");
#else
  return false;
#endif
}

}  // namespace

AttentionShape check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const auto dtype = q.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kBFloat16, "q is ", dtype, ", must be float32 or bfloat16");
  const auto check_dims = [](const at::Tensor& tensor, const char* name, const char* wanted) {
    TORCH_CHECK_VALUE(tensor.dim() == 4, name, " has shape ", tensor.sizes(), ", must be ", wanted);
  };
  check_dims(q, "q", "[B, Hq, Sq, D]");
  check_dims(k, "k", "[B, Hkv, Sk, D]");
  check_dims(v, "v", "[B, Hkv, Sk, Dv]");
  const int64_t B = q.size(0), Hq = q.size(1), Hkv = k.size(1), Sk = k.size(2), D = q.size(3), Dv = v.size(3);
  TORCH_CHECK_VALUE(D >= 1 && D <= kMaxHeadDim, "q has head dim ", D, ", must be from 1 to ", kMaxHeadDim);
  TORCH_CHECK_VALUE(Dv >= 1 && Dv <= kMaxHeadDim, "v has head dim ", Dv, ", must be from 1 to ", kMaxHeadDim);
  check_rows(q, "q", dtype, q.sizes());
  check_rows(k, "k", dtype, {B, Hkv, Sk, D});
  check_rows(v, "v", dtype, {B, Hkv, Sk, Dv});
  TORCH_CHECK_VALUE(
      Hkv > 0 ? Hq % Hkv == 0 : Hq == 0, "k has ", Hkv, " heads, which must divide the ", Hq, " of q");
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - kAttentionTile;
  TORCH_CHECK_VALUE(Sk <= kMost, "k has ", Sk, " keys, must be at most ", kMost);
  return {q.size(2), Sk, Hkv > 0 ? Hq / Hkv : 1, D, Dv};
}

PreparedTerms::PreparedTerms(const AttentionTerms& given, const at::Tensor& q, const AttentionShape& shape) : terms{} {
  const int64_t B = q.size(0), Hq = q.size(1);
  TORCH_CHECK_VALUE(std::isfinite(given.scale), "scale=", given.scale, " must be finite");
  TORCH_CHECK_VALUE(
      std::isfinite(given.softcap) && given.softcap >= 0, "softcap=", given.softcap,
      " must be finite and positive, or 0 for none");
  TORCH_CHECK_VALUE(
      given.dropout_p >= 0 && given.dropout_p < 1, "dropout_p=", given.dropout_p, " must be in [0, 1)");
  first_ = check_per_batch(given.first, "first", at::kInt, B, shape.queries);
  end_ = check_per_batch(given.end, "end", at::kInt, B, shape.queries);
  TORCH_CHECK_VALUE(
      first_.size(0) == end_.size(0), "first has ", first_.size(0), " batches and end ", end_.size(0),
      ", must be as many");
  if (given.alibi_slopes) {
    slopes_ = check_per_batch(*given.alibi_slopes, "alibi_slopes", at::kFloat, B, Hq);
    terms.slopes = slopes_.const_data_ptr<float>();
    terms.slope_batch_stride = batch_stride(slopes_);
  }
  terms.dropout = given.dropout_p > 0;
  if (given.alibi_slopes || terms.dropout) {
    query_positions_ = check_positions(given.query_positions, "query_positions", shape.queries);
    key_positions_ = check_positions(given.key_positions, "key_positions", shape.keys);
    terms.query_positions = query_positions_.const_data_ptr<int32_t>();
    terms.key_positions = key_positions_.const_data_ptr<int32_t>();
  }
  ranges_ = tile_ranges(first_, end_, shape);
  terms.first = first_.const_data_ptr<int32_t>();
  terms.end = end_.const_data_ptr<int32_t>();
  terms.ranges = ranges_.data();
  terms.mask_batch_stride = batch_stride(first_);
  terms.range_batch_stride = first_.size(0) == 1 ? 0 : (shape.queries + kAttentionTile - 1) / kAttentionTile;
  terms.scale = given.scale;
  terms.softcap = given.softcap;
  // As reference_attention.dropout_threshold: ties to even, as Python's round.
  terms.drop_below = static_cast<uint32_t>(std::min(std::nearbyint(given.dropout_p * 0x1p32), 0x1p32 - 1));
  terms.kept_factor = static_cast<float>(1 / (1 - given.dropout_p));
  terms.seed_low = static_cast<uint32_t>(given.seed);
  terms.seed_high = static_cast<uint32_t>(given.seed >> 32);
  terms.first_batch = static_cast<uint32_t>(given.first_batch);
  terms.first_head = static_cast<uint32_t>(given.first_head);
}

Kernel choose_kernel(const AttentionChoice& choice, at::ScalarType dtype) {
  const Capability capability = choose_capability(choice.capability);
  const bool pairs_are_fast = has_pair_instruction(capability);
  const std::string fastest = dtype == at::kBFloat16 && pairs_are_fast ? "pairs" : "float32";
  const std::string products = choice.products.value_or(fastest);
  TORCH_CHECK_VALUE(
      products == "float32" || products == "pairs", "products=", products, " must be float32 or pairs");
  if (products == "float32") {
    return {capability, Products::kFloat32};
  }
  TORCH_CHECK_VALUE(dtype == at::kBFloat16, "products=pairs multiplies bfloat16, but q is ", dtype);
  return {capability, pairs_are_fast ? Products::kPairInstruction : Products::kPairs};
}

Gradient gradient_of(const at::Tensor& tensor) {
  Gradient gradient{};
  if (tensor.scalar_type() == at::kFloat) {
    gradient.wide = rows_of<float>(tensor);
  } else {
    gradient.narrow = rows_of<uint16_t>(tensor);
  }
  return gradient;
}

}  // namespace paracore
