// Attention by pointers: what cpu/attention_*.cpp launch and cpu/kernels/attention*.{h,cpp} compute.
//
// The contract is paracore/reference_attention.py. Here T is float, or uint16_t for the bits of bfloat16 numbers.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../capability.h"

namespace paracore {

// Queries and keys of a tile. A multiple of every variant's block of a matrix product, in rows (6, 12) and in
// columns (8, 16, 32); large enough that copying a tile costs little beside its products, small enough that all
// tiles of a step stay in a second-level cache of half a megabyte at head dim 64, and about do at 128.
constexpr int64_t kAttentionTile = 96;
constexpr int64_t kMaxHeadDim = 256;

// How bfloat16 numbers are multiplied; sums are float32 always. kFloat32: widened first, so that products are
// exact. kPairs: two products at a time, weights and logits' gradients rounded to bfloat16 first, emulated with
// the arithmetic of any processor. kPairInstruction: the same by the instruction of AVX512-BF16.
enum class Products { kFloat32, kPairs, kPairInstruction };

// The rows of a tensor [batch, head, row, n] whose last dim is contiguous. Strides are in elements.
template <typename T>
struct Rows {
  T* data;
  int64_t batch_stride, head_stride, row_stride;

  T* at(int64_t batch, int64_t head, int64_t row) const {
    return data + batch * batch_stride + head * head_stride + row * row_stride;
  }
};

// A gradient, float32 or bfloat16; one of the two has data.
struct Gradient {
  Rows<float> wide;
  Rows<uint16_t> narrow;
};

// The keys that the queries of a tile see lie in [low, high); those in [all_low, all_high) every query sees.
struct TileRange {
  int64_t low, high, all_low, all_high;
};

struct AttentionShape {
  int64_t queries, keys, heads_per_group, head_dim, value_dim;
};

// Everything that decides a logit and its weight besides q and k: Terms of the reference.
struct LogitTerms {
  const int32_t* first;      // [B or 1, queries]
  const int32_t* end;        // [B or 1, queries]
  const TileRange* ranges;   // [B or 1, tiles of queries]
  const float* slopes;       // [B or 1, heads] or null
  const int32_t* query_positions;  // [queries] or null
  const int32_t* key_positions;    // [keys] or null
  int64_t mask_batch_stride, range_batch_stride, slope_batch_stride;
  double scale, softcap;
  bool dropout;
  uint32_t drop_below;    // a weight whose random word is less is dropped
  float kept_factor;      // 1 / (1 - dropout_p)
  uint32_t seed_low, seed_high, first_batch, first_head;
};

// With a state (row_max not null) it is continued and stored; else out and lse are written from a fresh one.
template <typename T>
struct AttentionForward {
  Rows<const T> q, k, v;
  Rows<float> row_max, row_sum, acc;
  const float* sink;  // [heads] or null
  Rows<T> out;
  Rows<float> lse;
  AttentionShape shape;
  LogitTerms terms;
};

template <typename T>
struct AttentionBackward {
  Rows<const T> dout, q, k, v;
  Rows<const float> lse, delta;
  Gradient dq, dk, dv;
  bool accumulate;
  AttentionShape shape;
  LogitTerms terms;
};

// A part of backward: these keys against these queries of these heads, which share one key head. Ranges are
// [begin, end), of heads or of tiles. The part writes what its ranges hold in full: dq when it has all keys,
// dk and dv when it has all queries of the group.
struct BackwardPart {
  int64_t batch, key_head;
  int64_t head_begin, head_end;
  int64_t query_tile_begin, query_tile_end;
  int64_t key_tile_begin, key_tile_end;
  bool writes_dq, writes_dk_dv;
};

PARACORE_DECLARE_VARIANTS(
    // Bytes of scratch memory, aligned to 64, that one call needs; it keeps nothing there between calls.
    template <Products kProducts>
    size_t attention_forward_scratch(const AttentionShape& shape);
    template <Products kProducts>
    size_t attention_backward_scratch(const AttentionShape& shape);

    // The queries of one tile of one head over all keys.
    template <typename T, Products kProducts>
    void attention_forward(
        const AttentionForward<T>& args, int64_t batch, int64_t head, int64_t tile, std::byte* scratch);

    // dq_sums: float32 [heads, queries of the part, head_dim] for sums of a dq that is bfloat16; else unused.
    template <typename T, Products kProducts>
    void attention_backward(
        const AttentionBackward<T>& args, const BackwardPart& part, std::byte* scratch, float* dq_sums);

    // out = acc / row_sum and lse of the rows [begin, end) of one head.
    template <typename T>
    void attention_finish(
        const AttentionForward<T>& args, int64_t batch, int64_t head, int64_t begin, int64_t end);

    // delta[i] = sum(out[i] * dout[i]) of the rows [begin, end) of one head.
    template <typename T>
    void attention_delta(
        const Rows<const T>& out, const Rows<const T>& dout, int64_t value_dim, int64_t batch, int64_t head,
        int64_t begin, int64_t end, float* delta);)

}  // namespace paracore
