// Attention on CPU tensors; the contract is documented in paracore/_C.pyi and paracore/reference_attention.py.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

namespace paracore {

// Terms of the reference.
struct AttentionTerms {
  at::Tensor first, end;
  double scale, softcap;
  std::optional<at::Tensor> alibi_slopes;
  double dropout_p;
  uint64_t seed;
  int64_t first_batch, first_head;
  std::optional<at::Tensor> query_positions, key_positions;
};

// Which kernel runs: an instruction set, and "float32" or "pairs" for how bfloat16 numbers are multiplied.
struct AttentionChoice {
  std::optional<std::string> capability, products;
};

// The bytes of memory that all threads together take for a call, and keep: the next call takes only what it needs more.
// tiles: copies of tiles and products of them. query_sums: sums of dq. The most that threads may come to, in whatever
// way items are dealt. Lists of tiles and parts, a few kilobytes, are left out.
struct AttentionScratch {
  int64_t tiles = 0, query_sums = 0;
};

// Of attention_forward and attention_continue. Sizes are those of q, k and v.
AttentionScratch attention_forward_scratch(
    const AttentionChoice& choice, at::ScalarType dtype, at::IntArrayRef q, at::IntArrayRef k, at::IntArrayRef v);

// Of attention_backward. dq_holds_sums: whether dq is float32.
AttentionScratch attention_backward_scratch(
    const AttentionChoice& choice,
    at::ScalarType dtype,
    at::IntArrayRef q,
    at::IntArrayRef k,
    at::IntArrayRef v,
    bool dq_holds_sums);

// Queries, and keys, are walked in tiles of this many.
int64_t attention_key_tile();

at::Tensor attention_forward(
    const AttentionTerms& terms,
    const AttentionChoice& choice,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const std::optional<at::Tensor>& sink,
    const at::Tensor& out);

void attention_continue(
    const AttentionTerms& terms,
    const AttentionChoice& choice,
    const at::Tensor& q,
    const at::Tensor& k,
    const at::Tensor& v,
    const at::Tensor& row_max,
    const at::Tensor& row_sum,
    const at::Tensor& acc);

at::Tensor attention_finish(
    const at::Tensor& row_max,
    const at::Tensor& row_sum,
    const at::Tensor& acc,
    const at::Tensor& out,
    const std::optional<std::string>& capability);

at::Tensor attention_delta(
    const at::Tensor& out, const at::Tensor& dout, const std::optional<std::string>& capability);

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
    bool accumulate);

}  // namespace paracore
