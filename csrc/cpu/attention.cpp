// Checks tensors and deals tiles out to threads; the mathematics is in kernels/attention_*.h.
#include "attention.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "attention_arguments.h"
#include "threads.h"

namespace paracore {
namespace {

constexpr int kScratch = 0, kQuerySums = 1;  // purposes of thread_memory
// Rows of which one thread finishes so many, or takes their delta, at a time.
constexpr int64_t kRowsPerItem = 256;
// Tiles of queries that share the layout of a tile of keys when a thread computes dq alone.
constexpr int64_t kTilesPerPart = 4;
// Numbers of dq that a thread sums up in memory of its own, which it keeps: 32 MiB.
constexpr int64_t kMaxQuerySums = 8 << 20;

int64_t ceil_divide(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Calls body with a null T* of q's dtype, as the kernels know it, and the products as a compile-time constant.
template <typename Body>
void dispatch(at::ScalarType dtype, Products products, const Body& body) {
  using Wide = std::integral_constant<Products, Products::kFloat32>;
  if (dtype == at::kFloat) {
    body(static_cast<float*>(nullptr), Wide{});
  } else if (products == Products::kFloat32) {
    body(static_cast<uint16_t*>(nullptr), Wide{});
  } else if (products == Products::kPairs) {
    body(static_cast<uint16_t*>(nullptr), std::integral_constant<Products, Products::kPairs>{});
  } else {
    body(static_cast<uint16_t*>(nullptr), std::integral_constant<Products, Products::kPairInstruction>{});
  }
}

template <typename T, Products kProducts>
struct Variant {
  decltype(&DEFAULT::attention_forward<T, kProducts>) forward;
  decltype(&DEFAULT::attention_backward<T, kProducts>) backward;
  decltype(&DEFAULT::attention_forward_scratch<kProducts>) forward_scratch;
  decltype(&DEFAULT::attention_backward_scratch<kProducts>) backward_scratch;
};

template <typename T, Products kProducts>
Variant<T, kProducts> variant_of(Capability capability) {
  if constexpr (kProducts == Products::kPairInstruction) {
#ifdef PARACORE_X86_VARIANTS
    return {&AVX512::attention_forward<T, kProducts>, &AVX512::attention_backward<T, kProducts>,
            &AVX512::attention_forward_scratch<kProducts>, &AVX512::attention_backward_scratch<kProducts>};
#else
    TORCH_CHECK(false, "this processor has no instruction for pairs of bfloat16");
#endif
  } else {
    Variant<T, kProducts> variant;
    variant.forward = PARACORE_VARIANT(capability, attention_forward<T, kProducts>);
    variant.backward = PARACORE_VARIANT(capability, attention_backward<T, kProducts>);
    variant.forward_scratch = PARACORE_VARIANT(capability, attention_forward_scratch<kProducts>);
    variant.backward_scratch = PARACORE_VARIANT(capability, attention_backward_scratch<kProducts>);
    return variant;
  }
}

// Tiles of queries are what threads take.
int64_t forward_items(const AttentionShape& shape, int64_t batches, int64_t heads) {
  return batches * heads * ceil_divide(shape.queries, kAttentionTile);
}

// The later tiles of a head first: under a causal mask they see the most keys.
template <typename T, Products kProducts>
void run_forward(const AttentionForward<T>& args, Capability capability, int64_t batches, int64_t heads) {
  const auto kernel = variant_of<T, kProducts>(capability);
  const size_t scratch = kernel.forward_scratch(args.shape);
  const int64_t tiles = ceil_divide(args.shape.queries, kAttentionTile);
  deal(forward_items(args.shape, batches, heads), [&](int64_t item) {
    const int64_t head = item / tiles, tile = tiles - 1 - item % tiles;
    kernel.forward(args, head / heads, head % heads, tile, thread_memory<kScratch>(scratch));
  });
}

// Backward's parts. With key heads enough for all threads, one part each, of five products for a pair of tiles.
// Else parts for dk and dv by tiles of keys and parts for dq by tiles of queries, which share two products: seven.
// Every sum has the same terms in the same order either way.
// Whole parts need the float32 sums of dq, where they are not dq itself, for all queries of the group at once: only
// where these are not too long.
std::vector<BackwardPart> backward_parts(
    const AttentionShape& shape, int64_t batches, int64_t key_heads, bool dq_holds_sums) {
  const int64_t group = shape.heads_per_group, threads = at::get_num_threads();
  const int64_t query_tiles = ceil_divide(shape.queries, kAttentionTile);
  const int64_t key_tiles = ceil_divide(shape.keys, kAttentionTile);
  const bool fits = dq_holds_sums || group * shape.queries * shape.head_dim <= kMaxQuerySums;
  const bool whole = fits && (threads == 1 || batches * key_heads >= 2 * threads);
  std::vector<BackwardPart> parts;
  for (int64_t unit = 0; unit < batches * key_heads; ++unit) {
    const int64_t batch = unit / key_heads, key_head = unit % key_heads, head = key_head * group;
    const BackwardPart all{batch, key_head, head, head + group, 0, query_tiles, 0, key_tiles, true, true};
    if (whole) {
      parts.push_back(all);
      continue;
    }
    for (int64_t tile = 0; tile < key_tiles; ++tile) {
      BackwardPart part = all;
      part.key_tile_begin = tile;
      part.key_tile_end = tile + 1;
      part.writes_dq = false;
      parts.push_back(part);
    }
    for (int64_t end = query_tiles * group; end > 0;) {
      BackwardPart part = all;
      part.head_begin = head + (end - 1) / query_tiles;
      part.head_end = part.head_begin + 1;
      part.query_tile_end = (end - 1) % query_tiles + 1;
      part.query_tile_begin = std::max<int64_t>(0, part.query_tile_end - kTilesPerPart);
      part.writes_dk_dv = false;
      end -= part.query_tile_end - part.query_tile_begin;
      parts.push_back(part);
    }
  }
  return parts;
}

// Bytes of a part's float32 sums of dq; none where dq holds them, or where other parts compute dq.
size_t query_sums_size(const AttentionShape& shape, const BackwardPart& part, bool dq_holds_sums) {
  if (!part.writes_dq || dq_holds_sums) {
    return 0;
  }
  const int64_t tiles = (part.head_end - part.head_begin) * (part.query_tile_end - part.query_tile_begin);
  return tiles * kAttentionTile * shape.head_dim * sizeof(float);
}

template <typename T, Products kProducts>
void run_backward(const AttentionBackward<T>& args, Capability capability, int64_t batches, int64_t key_heads) {
  const auto kernel = variant_of<T, kProducts>(capability);
  const size_t scratch = kernel.backward_scratch(args.shape);
  const bool dq_holds_sums = args.dq.wide.data != nullptr;
  const auto parts = backward_parts(args.shape, batches, key_heads, dq_holds_sums);
  deal(static_cast<int64_t>(parts.size()), [&](int64_t item) {
    const BackwardPart& part = parts[item];
    float* sums = nullptr;
    if (const size_t size = query_sums_size(args.shape, part, dq_holds_sums)) {
      sums = reinterpret_cast<float*>(thread_memory<kQuerySums>(size));
    }
    kernel.backward(args, part, thread_memory<kScratch>(scratch), sums);
  });
}

AttentionShape shape_of(at::IntArrayRef q, at::IntArrayRef k, at::IntArrayRef v) {
  return {q[2], k[2], k[1] > 0 ? q[1] / k[1] : 1, q[3], v[3]};
}

void check_state(
    const at::Tensor& row_max, const at::Tensor& row_sum, const at::Tensor& acc, at::IntArrayRef rows, int64_t Dv) {
  check_tensor(row_max, "row_max", at::kFloat, rows);
  check_tensor(row_sum, "row_sum", at::kFloat, rows);
  check_rows(acc, "acc", at::kFloat, {rows[0], rows[1], rows[2], Dv});
}

// Deals the rows of all heads: body(batch, head, begin, end).
template <typename Body>
void deal_rows(at::IntArrayRef rows, const Body& body) {
  const int64_t items = ceil_divide(rows[2], kRowsPerItem);
  deal(rows[0] * rows[1] * items, [&](int64_t item) {
    const int64_t head = item / items, begin = item % items * kRowsPerItem;
    body(head / rows[1], head % rows[1], begin, std::min(rows[2], begin + kRowsPerItem));
  });
}

}  // namespace

AttentionScratch attention_forward_scratch(
    const AttentionChoice& choice, at::ScalarType dtype, at::IntArrayRef q, at::IntArrayRef k, at::IntArrayRef v) {
  const AttentionShape shape = shape_of(q, k, v);
  const Kernel kernel = choose_kernel(choice, dtype);
  AttentionScratch scratch;
  dispatch(dtype, kernel.products, [&](auto* t, auto products) {
    using T = std::remove_pointer_t<decltype(t)>;
    const size_t size = variant_of<T, products.value>(kernel.capability).forward_scratch(shape);
    scratch.tiles = threads_for(forward_items(shape, q[0], q[1])) * size;
  });
  return scratch;
}

AttentionScratch attention_backward_scratch(
    const AttentionChoice& choice,
    at::ScalarType dtype,
    at::IntArrayRef q,
    at::IntArrayRef k,
    at::IntArrayRef v,
    bool dq_holds_sums) {
  const AttentionShape shape = shape_of(q, k, v);
  const Kernel kernel = choose_kernel(choice, dtype);
  const auto parts = backward_parts(shape, q[0], k[1], dq_holds_sums);
  size_t largest = 0;
  int64_t with_sums = 0;
  for (const BackwardPart& part : parts) {
    const size_t size = query_sums_size(shape, part, dq_holds_sums);
    largest = std::max(largest, size);
    with_sums += size > 0;
  }
  AttentionScratch scratch;
  scratch.query_sums = threads_for(with_sums) * largest;
  dispatch(dtype, kernel.products, [&](auto* t, auto products) {
    using T = std::remove_pointer_t<decltype(t)>;
    const size_t size = variant_of<T, products.value>(kernel.capability).backward_scratch(shape);
    scratch.tiles = threads_for(static_cast<int64_t>(parts.size())) * size;
  });
  return scratch;
}

int64_t attention_key_tile() {
  return kAttentionTile;
}

at::Tensor attention_forward(
    const AttentionTerms& terms,
    const AttentionChoice& choice,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const std::optional<at::Tensor>& sink,
    const at::Tensor& out) {
  const AttentionShape shape = check_inputs(q, k, v);
  const int64_t B = q.size(0), Hq = q.size(1);
  check_rows(out, "out", q.scalar_type(), {B, Hq, shape.queries, shape.value_dim});
  check_written(out, "out");
  if (sink) {
    check_tensor(*sink, "sink", at::kFloat, {Hq});
  }
  const PreparedTerms prepared(terms, q, shape);
  const Kernel kernel = choose_kernel(choice, q.scalar_type());
  const at::Tensor sinks = sink ? sink->contiguous() : at::Tensor();
  const at::Tensor lse = at::empty({B, Hq, shape.queries}, q.options().dtype(at::kFloat));
  dispatch(q.scalar_type(), kernel.products, [&](auto* t, auto products) {
    using T = std::remove_pointer_t<decltype(t)>;
    const AttentionForward<T> args{
        rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v), {}, {}, {},
        sink ? sinks.const_data_ptr<float>() : nullptr, rows_of<T>(out), rows_of<float>(lse), shape, prepared.terms};
    run_forward<T, products.value>(args, kernel.capability, B, Hq);
  });
  return lse;
}

void attention_continue(
    const AttentionTerms& terms,
    const AttentionChoice& choice,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& row_max,
    const at::Tensor& row_sum,
    const at::Tensor& acc) {
  const AttentionShape shape = check_inputs(q, k, v);
  const int64_t B = q.size(0), Hq = q.size(1);
  check_state(row_max, row_sum, acc, {B, Hq, shape.queries}, shape.value_dim);
  check_written(row_max, "row_max");
  check_written(row_sum, "row_sum");
  check_written(acc, "acc");
  const PreparedTerms prepared(terms, q, shape);
  const Kernel kernel = choose_kernel(choice, q.scalar_type());
  if (q.numel() == 0) {
    return;  // no state, whose null pointers would mean a fresh one
  }
  dispatch(q.scalar_type(), kernel.products, [&](auto* t, auto products) {
    using T = std::remove_pointer_t<decltype(t)>;
    const AttentionForward<T> args{
        rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v), rows_of<float>(row_max),
        rows_of<float>(row_sum), rows_of<float>(acc), nullptr, {}, {}, shape, prepared.terms};
    run_forward<T, products.value>(args, kernel.capability, B, Hq);
  });
}

at::Tensor attention_finish(
    const at::Tensor& row_max,
    const at::Tensor& row_sum,
    const at::Tensor& acc,
    const at::Tensor& out,
    const std::optional<std::string>& capability) {
  const auto dtype = out.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kBFloat16, "out is ", dtype, ", must be float32 or bfloat16");
  TORCH_CHECK_VALUE(
      acc.dim() == 4 && acc.size(3) >= 1 && acc.size(3) <= kMaxHeadDim, "acc has shape ", acc.sizes(),
      ", must be [B, Hq, Sq, Dv] with Dv from 1 to ", kMaxHeadDim);
  const auto rows = acc.sizes().slice(0, 3);
  check_state(row_max, row_sum, acc, rows, acc.size(3));
  check_rows(out, "out", dtype, acc.sizes());
  check_written(out, "out");
  const Capability variant = choose_capability(capability);
  const at::Tensor lse = at::empty(rows, row_max.options());
  dispatch(dtype, Products::kFloat32, [&](auto* t, auto) {
    using T = std::remove_pointer_t<decltype(t)>;
    AttentionForward<T> args{};
    args.row_max = rows_of<float>(row_max);
    args.row_sum = rows_of<float>(row_sum);
    args.acc = rows_of<float>(acc);
    args.out = rows_of<T>(out);
    args.lse = rows_of<float>(lse);
    args.shape.value_dim = acc.size(3);
    const auto kernel = PARACORE_VARIANT(variant, attention_finish<T>);
    deal_rows(rows, [&](int64_t batch, int64_t head, int64_t begin, int64_t end) {
      kernel(args, batch, head, begin, end);
    });
  });
  return lse;
}

at::Tensor attention_delta(
    const at::Tensor& out, const at::Tensor& dout, const std::optional<std::string>& capability) {
  const auto dtype = out.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kBFloat16, "out is ", dtype, ", must be float32 or bfloat16");
  TORCH_CHECK_VALUE(
      out.dim() == 4 && out.size(3) >= 1 && out.size(3) <= kMaxHeadDim, "out has shape ", out.sizes(),
      ", must be [B, Hq, Sq, Dv] with Dv from 1 to ", kMaxHeadDim);
  check_rows(out, "out", dtype, out.sizes());
  check_rows(dout, "dout", dtype, out.sizes());
  const Capability variant = choose_capability(capability);
  const auto rows = out.sizes().slice(0, 3);
  const at::Tensor delta = at::empty(rows, out.options().dtype(at::kFloat));
  dispatch(dtype, Products::kFloat32, [&](auto* t, auto) {
    using T = std::remove_pointer_t<decltype(t)>;
    const auto kernel = PARACORE_VARIANT(variant, attention_delta<T>);
    const Rows<float> deltas = rows_of<float>(delta);
    deal_rows(rows, [&](int64_t batch, int64_t head, int64_t begin, int64_t end) {
      kernel(rows_of<const T>(out), rows_of<const T>(dout), out.size(3), batch, head, begin, end,
             deltas.at(batch, head, 0));
    });
  });
  return delta;
}

void attention_backward(
    const AttentionTerms& terms,
    const AttentionChoice& choice,
    const at::Tensor& dout,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& lse,
    const at::Tensor& delta,
    const at::Tensor& dq,
    const at::Tensor& dk,
    const at::Tensor& dv,
    bool accumulate) {
  const AttentionShape shape = check_inputs(q, k, v);
  const int64_t B = q.size(0), Hq = q.size(1);
  check_rows(dout, "dout", q.scalar_type(), {B, Hq, shape.queries, shape.value_dim});
  check_tensor(lse, "lse", at::kFloat, {B, Hq, shape.queries});
  check_tensor(delta, "delta", at::kFloat, {B, Hq, shape.queries});
  const auto check_gradient = [&](const at::Tensor& gradient, const char* name, const at::Tensor& of) {
    const bool wide = gradient.scalar_type() == at::kFloat;
    check_rows(gradient, name, wide ? at::kFloat : q.scalar_type(), of.sizes());
    check_written(gradient, name);
  };
  check_gradient(dq, "dq", q);
  check_gradient(dk, "dk", k);
  check_gradient(dv, "dv", v);
  const PreparedTerms prepared(terms, q, shape);
  const Kernel kernel = choose_kernel(choice, q.scalar_type());
  dispatch(q.scalar_type(), kernel.products, [&](auto* t, auto products) {
    using T = std::remove_pointer_t<decltype(t)>;
    const AttentionBackward<T> args{
        rows_of<const T>(dout), rows_of<const T>(q), rows_of<const T>(k), rows_of<const T>(v),
        rows_of<const float>(lse), rows_of<const float>(delta), gradient_of(dq), gradient_of(dk), gradient_of(dv),
        accumulate, shape, prepared.terms};
    run_backward<T, products.value>(args, kernel.capability, B, k.size(1));
  });
}

}  // namespace paracore
