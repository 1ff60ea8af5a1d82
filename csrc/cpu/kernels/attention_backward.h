// Attention's backward: a tile of keys at a time against every tile of queries that sees some of them.
//
// Here weights are [queries, keys]: of the two operands of every product, the one that must be transposed or is
// otherwise dear to lay out comes from the keys, once for all tiles of queries.
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include "attention_forward.h"
#include "logits.h"
#include "tile.h"

namespace paracore {
namespace CPU_CAPABILITY {

template <Products kProducts>
struct BackwardScratch {
  using W = Word<kProducts>;
  static constexpr bool kFloat32 = kProducts == Products::kFloat32;
  Matrix<W> k_columns, v_columns;      // [words of head_dim or value_dim, keys]
  Matrix<W> k_sums;                    // [words of keys, head_dim], to be summed over keys
  Matrix<W> q, dout;                   // [queries, words of head_dim or value_dim]
  Matrix<W> q_sums, dout_sums;         // [words of queries, head_dim or value_dim], to be summed over queries
  Matrix<float> weights, dlogits;      // [queries, keys]
  Matrix<W> weight_sums, dlogit_sums;  // the same, [words of queries, keys]
  Matrix<W> dlogit_rows;               // the same, [queries, words of keys]
  Matrix<float> dk, dv;                // [keys, head_dim or value_dim]
  Matrix<float> dq;                    // [queries, head_dim]
  float *base, *delta;
  int32_t *first, *end, *positions;  // of the queries
  int32_t *key_positions;

  size_t size;

  BackwardScratch(std::byte* memory, const AttentionShape& shape) {
    Carver carve(memory);
    const int64_t q_stride = row_stride(shape.head_dim), v_stride = row_stride(shape.value_dim);
    const int64_t q_words = words_of<kProducts>(shape.head_dim), v_words = words_of<kProducts>(shape.value_dim);
    const int64_t tile_words = words_of<kProducts>(kAttentionTile);
    k_columns = carve.matrix<W>(q_words, kTileStride);
    v_columns = carve.matrix<W>(v_words, kTileStride);
    k_sums = carve.matrix<W>(tile_words, q_stride);
    q = carve.matrix<W>(kAttentionTile, row_stride(q_words));
    dout = carve.matrix<W>(kAttentionTile, row_stride(v_words));
    weights = carve.matrix<float>(kAttentionTile, kTileStride);
    dlogits = carve.matrix<float>(kAttentionTile, kTileStride);
    if constexpr (kFloat32) {
      q_sums = q;
      dout_sums = dout;
      weight_sums = weights;
      dlogit_sums = dlogit_rows = dlogits;
    } else {
      q_sums = carve.matrix<W>(tile_words, q_stride);
      dout_sums = carve.matrix<W>(tile_words, v_stride);
      weight_sums = carve.matrix<W>(tile_words, kTileStride);
      dlogit_sums = carve.matrix<W>(tile_words, kTileStride);
      dlogit_rows = carve.matrix<W>(kAttentionTile, row_stride(tile_words));
    }
    dk = carve.matrix<float>(kAttentionTile, q_stride);
    dv = carve.matrix<float>(kAttentionTile, v_stride);
    dq = carve.matrix<float>(kAttentionTile, q_stride);
    base = carve.array<float>(kAttentionTile);
    delta = carve.array<float>(kAttentionTile);
    first = carve.array<int32_t>(kAttentionTile);
    end = carve.array<int32_t>(kAttentionTile);
    positions = carve.array<int32_t>(kAttentionTile);
    key_positions = carve.array<int32_t>(kAttentionTile);
    size = carve.size();
  }
};

inline Integers ascending() {
  Integers lanes;
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = lane;
  }
  return lanes;
}

// Whether some query of the part may see some of these keys.
inline bool some_query_sees(const LogitTerms& terms, const BackwardPart& part, int64_t key, int64_t keys) {
  const TileRange* const ranges = terms.ranges + part.batch * terms.range_batch_stride;
  return std::any_of(ranges + part.query_tile_begin, ranges + part.query_tile_end, [&](const TileRange& range) {
    return key < range.high && key + keys > range.low;
  });
}

template <typename T, Products kProducts>
inline void copy_keys(
    const AttentionBackward<T>& args, int64_t batch, int64_t key_head, int64_t key, int64_t keys,
    const BackwardScratch<kProducts>& scratch) {
  const AttentionShape& shape = args.shape;
  const T* const k = args.k.at(batch, key_head, key);
  const T* const v = args.v.at(batch, key_head, key);
  copy_rows<kProducts>(k, args.k.row_stride, keys, shape.head_dim, scratch.q);
  transpose(scratch.q, keys, words_of<kProducts>(shape.head_dim), scratch.k_columns);
  copy_rows<kProducts>(v, args.v.row_stride, keys, shape.value_dim, scratch.dout);
  transpose(scratch.dout, keys, words_of<kProducts>(shape.value_dim), scratch.v_columns);
  copy_values<T, kProducts>(k, args.k.row_stride, keys, shape.head_dim, scratch.k_sums);
  for (int64_t i = 0; i < kAttentionTile; ++i) {
    scratch.key_positions[i] = i < keys && args.terms.key_positions != nullptr ? args.terms.key_positions[key + i] : 0;
  }
}

template <typename T, Products kProducts>
inline void copy_queries(
    const AttentionBackward<T>& args, int64_t batch, int64_t head, int64_t query, int64_t queries,
    const BackwardScratch<kProducts>& scratch) {
  const AttentionShape& shape = args.shape;
  const T* const q = args.q.at(batch, head, query);
  const T* const dout = args.dout.at(batch, head, query);
  copy_rows<kProducts>(q, args.q.row_stride, queries, shape.head_dim, scratch.q);
  copy_rows<kProducts>(dout, args.dout.row_stride, queries, shape.value_dim, scratch.dout);
  if constexpr (kProducts != Products::kFloat32) {
    copy_row_pairs(q, args.q.row_stride, queries, shape.head_dim, scratch.q_sums);
    copy_row_pairs(dout, args.dout.row_stride, queries, shape.value_dim, scratch.dout_sums);
  }
  for (int64_t i = 0; i < queries; ++i) {
    // A row that has seen nothing has no weights: with an infinite base they become zero.
    const float lse = *args.lse.at(batch, head, query + i);
    scratch.base[i] = lse == -kInfinity ? kInfinity : kLog2E * lse;
    scratch.delta[i] = *args.delta.at(batch, head, query + i);
  }
}

// A row of weights and logits' gradients in place of q k^T and dout v^T: the keys of `span`, which is all of them
// if not kMasked; zero for the others.
template <bool kMasked, Products kProducts>
inline void differentiate_row(
    const BackwardScratch<kProducts>& scratch, const HeadTerms& terms, float scale, int64_t query,
    const KeySpan& span, int64_t keys) {
  float* const weights = scratch.weights.row(query);
  float* const dlogits = scratch.dlogits.row(query);
  const Floats base = fill(scratch.base[query]);
  const Floats delta = fill(scratch.delta[query]);
  const Integers index = ascending(), begin = fill(static_cast<int32_t>(span.begin));
  const Integers end = fill(static_cast<int32_t>(span.end));
  const int64_t from = kMasked ? span.begin / kLanes * kLanes : 0;
  const int64_t to = kMasked ? round_up(span.end, kLanes) : keys;
  if constexpr (kMasked) {
    std::fill(weights, weights + from, 0.f);
    std::fill(dlogits, dlogits + from, 0.f);
    std::fill(weights + to, weights + kAttentionTile, 0.f);
    std::fill(dlogits + to, dlogits + kAttentionTile, 0.f);
  }
  for (int64_t key = from; key < to; key += kLanes) {
    const Lanes at{fill(scratch.positions[query]), load<Integers>(scratch.key_positions + key)};
    Floats value = load<Floats>(weights + key), derivative = fill(1.f);
    // The logit is rounded, as it was when it became a row's maximum: where lse is one logit, this is its weight 1.
    value = (terms.plain ? value * terms.scale * kLog2E : logit(terms, value, at, derivative)) - base;
    if constexpr (kMasked) {
      const Integers lanes = index + static_cast<int32_t>(key);
      value = (lanes >= begin) & (lanes < end) ? value : fill(-kInfinity);
    }
    const Floats weight = exp2(value);
    Floats dweight = load<Floats>(dlogits + key), kept = weight;
    if (terms.dropout) {
      kept = drop(terms, weight, at);
      dweight = drop(terms, dweight, at);
    }
    store(weights + key, kept);
    store(dlogits + key, weight * (dweight - delta) * (derivative * scale));
  }
}

// What one tile of queries adds to dk and dv, and of scratch.dq what the keys add to it.
template <Products kProducts>
inline void differentiate_tile(
    const BackwardScratch<kProducts>& scratch, const HeadTerms& terms, const AttentionShape& shape, float scale,
    int64_t queries, int64_t key_begin, int64_t keys, bool all_seen, const BackwardPart& part) {
  multiply<kProducts, Walk::kRows, Into::kReplace>(
      scratch.q, scratch.k_columns, scratch.weights, queries, keys, words_of<kProducts>(shape.head_dim));
  multiply<kProducts, Walk::kRows, Into::kReplace>(
      scratch.dout, scratch.v_columns, scratch.dlogits, queries, keys, words_of<kProducts>(shape.value_dim));
  for (int64_t query = 0; query < queries; ++query) {
    if (all_seen && keys == kAttentionTile) {
      differentiate_row<false>(scratch, terms, scale, query, {0, keys}, keys);
    } else {
      const KeySpan span = seen_keys(scratch.first + query, scratch.end + query, 1, key_begin, keys);
      differentiate_row<true>(scratch, terms, scale, query, span.empty() ? KeySpan{0, 0} : span, keys);
    }
  }
  const int64_t query_words = words_of<kProducts>(queries), key_words = words_of<kProducts>(keys);
  if constexpr (kProducts != Products::kFloat32) {
    if (queries % 2 != 0) {
      std::fill_n(scratch.weights.row(queries), kAttentionTile, 0.f);
      std::fill_n(scratch.dlogits.row(queries), kAttentionTile, 0.f);
    }
    round_to_row_pairs(scratch.weights, 2 * query_words, kAttentionTile, scratch.weight_sums);
    round_to_row_pairs(scratch.dlogits, 2 * query_words, kAttentionTile, scratch.dlogit_sums);
    round_rows(scratch.dlogits, queries, kAttentionTile, scratch.dlogit_rows);
  }
  if (part.writes_dk_dv) {
    multiply<kProducts, Walk::kColumns, Into::kAdd>(
        scratch.weight_sums, scratch.dout_sums, scratch.dv, keys, shape.value_dim, query_words);
    multiply<kProducts, Walk::kColumns, Into::kAdd>(
        scratch.dlogit_sums, scratch.q_sums, scratch.dk, keys, shape.head_dim, query_words);
  }
  if (part.writes_dq) {
    multiply<kProducts, Walk::kRows, Into::kReplace>(
        scratch.dlogit_rows, scratch.k_sums, scratch.dq, queries, shape.head_dim, key_words);
  }
}

// Calls body with the rows of a gradient, whichever its dtype.
template <typename Body>
inline void with_rows(const Gradient& gradient, const Body& body) {
  if (gradient.wide.data != nullptr) {
    body(gradient.wide);
  } else {
    body(gradient.narrow);
  }
}

inline void write_gradient(
    const Gradient& gradient, const Matrix<float>& from, int64_t batch, int64_t head, int64_t row, int64_t rows,
    int64_t size, bool accumulate) {
  with_rows(gradient, [&](const auto& to) {
    for (int64_t i = 0; i < rows; ++i) {
      write_row(from.row(i), size, accumulate, to.at(batch, head, row + i));
    }
  });
}

// Where the sums of dq are kept while keys are walked: in dq itself if it is float32, else in a buffer.
template <typename T>
class QuerySums {
 public:
  QuerySums(const AttentionBackward<T>& args, const BackwardPart& part, float* buffer)
      : args_(args), part_(part), buffer_(buffer),
        query_begin_(part.query_tile_begin * kAttentionTile),
        query_end_(std::min(part.query_tile_end * kAttentionTile, args.shape.queries)) {}

  float* at(int64_t head, int64_t query) const {
    if (args_.dq.wide.data != nullptr) {
      return args_.dq.wide.at(part_.batch, head, query);
    }
    const int64_t row = (head - part_.head_begin) * (query_end_ - query_begin_) + query - query_begin_;
    return buffer_ + row * args_.shape.head_dim;
  }

  // Zero, or what is there to be added to.
  void begin() const {
    for_each_row([&](int64_t head, int64_t query) {
      float* const sums = at(head, query);
      if (!args_.accumulate) {
        std::fill_n(sums, args_.shape.head_dim, 0.f);
      } else if (args_.dq.wide.data == nullptr) {
        copy_row(args_.dq.narrow.at(part_.batch, head, query), args_.shape.head_dim, sums);
      }
    });
  }

  void end() const {
    if (args_.dq.wide.data == nullptr) {
      for_each_row([&](int64_t head, int64_t query) {
        write_row(at(head, query), args_.shape.head_dim, false, args_.dq.narrow.at(part_.batch, head, query));
      });
    }
  }

 private:
  template <typename Body>
  void for_each_row(const Body& body) const {
    for (int64_t head = part_.head_begin; head < part_.head_end; ++head) {
      for (int64_t query = query_begin_; query < query_end_; ++query) {
        body(head, query);
      }
    }
  }

  const AttentionBackward<T>& args_;
  const BackwardPart& part_;
  float* buffer_;
  int64_t query_begin_, query_end_;
};

// A tile of keys against the part's queries of one head.
template <typename T, Products kProducts>
inline void walk_queries(
    const AttentionBackward<T>& args, const BackwardPart& part, int64_t head, int64_t key, int64_t keys,
    const QuerySums<T>& sums, const BackwardScratch<kProducts>& scratch) {
  const AttentionShape& shape = args.shape;
  const HeadTerms terms = head_terms(args.terms, part.batch, head);
  const TileRange* const ranges = args.terms.ranges + part.batch * args.terms.range_batch_stride;
  for (int64_t tile = part.query_tile_begin; tile < part.query_tile_end; ++tile) {
    if (key >= ranges[tile].high || key + keys <= ranges[tile].low) {
      continue;
    }
    const int64_t query = tile * kAttentionTile, queries = std::min(kAttentionTile, shape.queries - query);
    copy_query_terms(
        args.terms, part.batch, query, queries, shape.keys, scratch.first, scratch.end, scratch.positions);
    const bool all_seen = ranges[tile].all_low <= key && key + keys <= ranges[tile].all_high;
    if (!all_seen && seen_keys(scratch.first, scratch.end, queries, key, keys).empty()) {
      continue;
    }
    copy_queries<T, kProducts>(args, part.batch, head, query, queries, scratch);
    differentiate_tile(scratch, terms, shape, static_cast<float>(args.terms.scale), queries, key, keys, all_seen, part);
    for (int64_t i = 0; part.writes_dq && i < queries; ++i) {
      write_row(scratch.dq.row(i), shape.head_dim, true, sums.at(head, query + i));
    }
  }
}

template <Products kProducts>
size_t attention_backward_scratch(const AttentionShape& shape) {
  return BackwardScratch<kProducts>(nullptr, shape).size;
}

template <typename T, Products kProducts>
void attention_backward(
    const AttentionBackward<T>& args, const BackwardPart& part, std::byte* memory, float* dq_sums) {
  const BackwardScratch<kProducts> scratch(memory, args.shape);
  const AttentionShape& shape = args.shape;
  const QuerySums<T> sums(args, part, dq_sums);
  if (part.writes_dq) {
    sums.begin();
  }
  for (int64_t tile = part.key_tile_begin; tile < part.key_tile_end; ++tile) {
    const int64_t key = tile * kAttentionTile, keys = std::min(kAttentionTile, shape.keys - key);
    if (!part.writes_dk_dv && !some_query_sees(args.terms, part, key, keys)) {
      continue;
    }
    copy_keys<T, kProducts>(args, part.batch, part.key_head, key, keys, scratch);
    std::fill_n(scratch.dk.data, kAttentionTile * scratch.dk.stride, 0.f);
    std::fill_n(scratch.dv.data, kAttentionTile * scratch.dv.stride, 0.f);
    for (int64_t head = part.head_begin; head < part.head_end; ++head) {
      walk_queries<T, kProducts>(args, part, head, key, keys, sums, scratch);
    }
    if (part.writes_dk_dv) {
      write_gradient(args.dk, scratch.dk, part.batch, part.key_head, key, keys, shape.head_dim, args.accumulate);
      write_gradient(args.dv, scratch.dv, part.batch, part.key_head, key, keys, shape.value_dim, args.accumulate);
    }
  }
  if (part.writes_dq) {
    sums.end();
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
