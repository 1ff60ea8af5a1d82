// Attention's forward: the online softmax of the queries of a tile over all keys, a tile of keys at a time.
//
// Weights are computed transposed, [keys, queries]: queries lie in the lanes of vectors, so that maxima and sums
// over keys need no step across lanes, and the transposed tile is just what the product with v wants to walk.
// Include only from cpu/kernels/: everything here depends on CPU_CAPABILITY.
#pragma once

#include <cmath>

#include "logits.h"
#include "tile.h"

namespace paracore {
namespace CPU_CAPABILITY {

// The scratch of one tile of queries.
template <Products kProducts>
struct ForwardScratch {
  using W = Word<kProducts>;
  Matrix<W> q;            // [words of head_dim, queries]
  Matrix<W> k;            // [keys, words of head_dim]
  Matrix<W> v;            // [words of keys, value_dim]
  Matrix<float> weights;  // [keys, queries]
  Matrix<W> rounded;      // [words of keys, queries]: the weights as they are multiplied
  Matrix<float> acc;      // [queries, value_dim]
  float *row_max, *row_sum, *rescale;
  int32_t *first, *end, *positions;  // of the queries; a query that is not there sees nothing

  size_t size;

  ForwardScratch(std::byte* memory, const AttentionShape& shape) {
    Carver carve(memory);
    q = carve.matrix<W>(words_of<kProducts>(shape.head_dim), kTileStride);
    k = carve.matrix<W>(kAttentionTile, row_stride(words_of<kProducts>(shape.head_dim)));
    v = carve.matrix<W>(words_of<kProducts>(kAttentionTile), row_stride(shape.value_dim));
    weights = carve.matrix<float>(kAttentionTile, kTileStride);
    if constexpr (kProducts == Products::kFloat32) {
      rounded = weights;
    } else {
      rounded = carve.matrix<W>(kAttentionTile / 2, kTileStride);
    }
    acc = carve.matrix<float>(kAttentionTile, row_stride(shape.value_dim));
    row_max = carve.array<float>(kAttentionTile);
    row_sum = carve.array<float>(kAttentionTile);
    rescale = carve.array<float>(kAttentionTile);
    first = carve.array<int32_t>(kAttentionTile);
    end = carve.array<int32_t>(kAttentionTile);
    positions = carve.array<int32_t>(kAttentionTile);
    size = carve.size();
  }
};

// first, end and positions of a tile's queries. Ends are cut at the last key, so that padding is hidden too.
inline void copy_query_terms(
    const LogitTerms& terms, int64_t batch, int64_t query, int64_t queries, int64_t keys, int32_t* first,
    int32_t* end, int32_t* positions) {
  const int64_t offset = batch * terms.mask_batch_stride + query;
  for (int64_t i = 0; i < kAttentionTile; ++i) {
    first[i] = i < queries ? std::max(terms.first[offset + i], 0) : std::numeric_limits<int32_t>::max();
    end[i] = i < queries ? std::min(terms.end[offset + i], static_cast<int32_t>(keys)) : 0;
    positions[i] = i < queries && terms.query_positions != nullptr ? terms.query_positions[query + i] : 0;
  }
}

// Where a panel of weights, kBlockColumns queries wide, meets a tile of keys.
struct Panel {
  int64_t query;         // the first, in the tile
  int64_t key_begin;     // the first key of the tile
  int64_t begin, end;    // the keys to compute, in the tile
  const int32_t* key_positions;  // of the tile's keys, or null
};

inline Lanes lanes_at(const Panel& panel, const Integers& positions, int64_t key) {
  return {positions, fill(panel.key_positions == nullptr ? 0 : panel.key_positions[key])};
}

// Turns products into logits, where they are not to stay products, and hides what is not seen. Returns maxima
// in `maxima`, which come in as those of the keys before.
template <bool kMasked, Products kProducts>
inline void find_maxima(
    const ForwardScratch<kProducts>& scratch, const HeadTerms& terms, const Panel& panel, Floats (&maxima)[2]) {
  for (int v = 0; v < 2; ++v) {
    const int64_t query = panel.query + v * kLanes;
    const Integers first = load<Integers>(scratch.first + query), end = load<Integers>(scratch.end + query);
    const Integers positions = load<Integers>(scratch.positions + query);
    Floats largest = maxima[v];
    for (int64_t key = panel.begin; key < panel.end; ++key) {
      float* const place = scratch.weights.row(key) + query;
      Floats value = load<Floats>(place);
      if (!terms.plain) {
        Floats unused;
        value = logit(terms, value, lanes_at(panel, positions, key), unused);
      }
      if constexpr (kMasked) {
        const Integers index = fill(static_cast<int32_t>(panel.key_begin + key));
        value = (index >= first) & (index < end) ? value : fill(-kInfinity);
      }
      if (kMasked || !terms.plain) {
        store(place, value);
      }
      largest = larger(largest, terms.plain ? value * terms.scale * kLog2E : value);
    }
    maxima[v] = largest;
  }
}

// The weights of a panel in place of its products, and the queries' state but for acc, whose factor to come is
// left in `rescale`.
template <bool kMasked, Products kProducts>
inline void soften(const ForwardScratch<kProducts>& scratch, const HeadTerms& terms, const Panel& panel) {
  Floats maxima[2], bases[2], sums[2], before[2];
  for (int v = 0; v < 2; ++v) {
    maxima[v] = before[v] = load<Floats>(scratch.row_max + panel.query + v * kLanes);
  }
  find_maxima<kMasked>(scratch, terms, panel, maxima);
  for (int v = 0; v < 2; ++v) {
    bases[v] = maxima[v] == -kInfinity ? Floats{} : maxima[v];
    sums[v] = Floats{};
  }
  const float scale = terms.plain ? terms.scale : 1.f, base_change = terms.plain ? kLog2E : 1.f;
  for (int64_t key = panel.begin; key < panel.end; ++key) {
    for (int v = 0; v < 2; ++v) {
      const int64_t query = panel.query + v * kLanes;
      float* const place = scratch.weights.row(key) + query;
      // The logit is rounded first, as it was for its maximum: the largest weight is 1.
      Floats weight = exp2(load<Floats>(place) * scale * base_change - bases[v]);
      sums[v] = sums[v] + weight;
      if (terms.dropout) {
        weight = drop(terms, weight, lanes_at(panel, load<Integers>(scratch.positions + query), key));
      }
      store(place, weight);
    }
  }
  for (int v = 0; v < 2; ++v) {
    const int64_t query = panel.query + v * kLanes;
    // A query that sees none of these keys keeps its state, to the bit.
    const Floats rescale = maxima[v] == before[v] ? fill(1.f) : exp2(before[v] - bases[v]);
    store(scratch.rescale + query, rescale);
    store(scratch.row_sum + query, multiply_add(load<Floats>(scratch.row_sum + query), rescale, sums[v]));
    store(scratch.row_max + query, maxima[v]);
  }
}

inline void zero_weights(const Matrix<float>& weights, int64_t query, int64_t key_begin, int64_t key_end) {
  for (int64_t key = key_begin; key < key_end; ++key) {
    std::fill_n(weights.row(key) + query, kBlockColumns, 0.f);
  }
}

// Logits and weights of all panels of a tile. Of a tile that not every query sees in full, a panel computes the
// keys that one of its queries sees: the others' weights are zero.
template <Products kProducts>
inline void weigh_tile(
    const ForwardScratch<kProducts>& scratch, const HeadTerms& terms, Panel panel, int64_t queries, int64_t keys,
    int64_t head_words, bool all_seen) {
  const int64_t padded_keys = round_up(keys, Multiplier<kProducts>::kNumbers);
  for (panel.query = 0; panel.query < queries; panel.query += kBlockColumns) {
    const auto span = all_seen ? KeySpan{0, keys}
                               : seen_keys(scratch.first + panel.query, scratch.end + panel.query, kBlockColumns,
                                           panel.key_begin, keys);
    if (span.empty()) {
      zero_weights(scratch.weights, panel.query, 0, padded_keys);
      std::fill_n(scratch.rescale + panel.query, kBlockColumns, 1.f);
      continue;
    }
    const int64_t block_begin = span.begin / kBlockRows * kBlockRows;
    multiply<kProducts, Walk::kRows, Into::kReplace>(
        {scratch.k.row(block_begin), scratch.k.stride}, {scratch.q.data + panel.query, scratch.q.stride},
        {scratch.weights.row(block_begin) + panel.query, scratch.weights.stride}, span.end - block_begin,
        kBlockColumns, head_words);
    panel.begin = span.begin;
    panel.end = span.end;
    if (all_seen) {
      soften<false>(scratch, terms, panel);
    } else {
      soften<true>(scratch, terms, panel);
    }
    zero_weights(scratch.weights, panel.query, 0, span.begin);
    zero_weights(scratch.weights, panel.query, span.end, padded_keys);
  }
}

template <typename T, Products kProducts>
inline void copy_values(
    const T* v, int64_t stride, int64_t keys, int64_t value_dim, const Matrix<Word<kProducts>>& to) {
  if constexpr (kProducts == Products::kFloat32) {
    copy_rows<kProducts>(v, stride, keys, value_dim, to);
  } else {
    copy_row_pairs(v, stride, keys, value_dim, to);
  }
}

template <typename T, Products kProducts>
inline void walk_keys(
    const AttentionForward<T>& args, int64_t batch, int64_t head, const TileRange& range, int64_t queries,
    const ForwardScratch<kProducts>& scratch) {
  const AttentionShape& shape = args.shape;
  const int64_t key_head = head / shape.heads_per_group;
  const int64_t head_words = words_of<kProducts>(shape.head_dim);
  const HeadTerms terms = head_terms(args.terms, batch, head);
  for (int64_t key = range.low / kAttentionTile * kAttentionTile; key < range.high; key += kAttentionTile) {
    const int64_t keys = std::min(kAttentionTile, shape.keys - key);
    const bool all_seen = range.all_low <= key && key + keys <= range.all_high;
    if (!all_seen && seen_keys(scratch.first, scratch.end, queries, key, keys).empty()) {
      continue;
    }
    copy_rows<kProducts>(args.k.at(batch, key_head, key), args.k.row_stride, keys, shape.head_dim, scratch.k);
    copy_values<T, kProducts>(
        args.v.at(batch, key_head, key), args.v.row_stride, keys, shape.value_dim, scratch.v);
    const int32_t* const positions = args.terms.key_positions;
    const Panel panel{0, key, 0, 0, positions == nullptr ? nullptr : positions + key};
    weigh_tile(scratch, terms, panel, queries, keys, head_words, all_seen);
    if constexpr (kProducts != Products::kFloat32) {
      round_to_row_pairs(scratch.weights, round_up(keys, 2), queries, scratch.rounded);
    }
    multiply<kProducts, Walk::kColumns, Into::kRescale>(
        scratch.rounded, scratch.v, scratch.acc, queries, shape.value_dim, words_of<kProducts>(keys),
        scratch.rescale);
  }
}

// A row's sums divided by their weights' sum; zero, and lse -inf, for a row that has seen nothing.
template <typename T>
inline float finish_row(float row_max, float row_sum, float* acc, int64_t size, T* out) {
  const bool seen = !(row_sum == 0.f);  // a sum that is not a number shows
  for (int64_t i = 0; i < size; ++i) {
    acc[i] = seen ? acc[i] / row_sum : 0.f;
  }
  write_row(acc, size, false, out);
  // In float64: backward takes exp2 of what is left after subtracting it.
  return seen ? static_cast<float>((row_max + std::log2(static_cast<double>(row_sum))) / kLog2E) : -kInfinity;
}

template <typename T, Products kProducts>
inline void begin_state(
    const AttentionForward<T>& args, int64_t batch, int64_t head, int64_t query, int64_t queries,
    const ForwardScratch<kProducts>& scratch) {
  const bool continues = args.row_max.data != nullptr;
  const float sink = args.sink == nullptr ? -kInfinity : static_cast<float>(kLog2E * args.sink[head]);
  for (int64_t i = 0; i < kAttentionTile; ++i) {
    float* const acc = scratch.acc.row(i);
    std::fill_n(acc, scratch.acc.stride, 0.f);
    scratch.row_max[i] = sink;
    scratch.row_sum[i] = args.sink == nullptr ? 0.f : 1.f;
    if (continues && i < queries) {
      scratch.row_max[i] = *args.row_max.at(batch, head, query + i);
      scratch.row_sum[i] = *args.row_sum.at(batch, head, query + i);
      copy_row(args.acc.at(batch, head, query + i), args.shape.value_dim, acc);
    }
  }
}

template <typename T, Products kProducts>
inline void store_state(
    const AttentionForward<T>& args, int64_t batch, int64_t head, int64_t query, int64_t queries,
    const ForwardScratch<kProducts>& scratch) {
  for (int64_t i = 0; i < queries; ++i) {
    float* const acc = scratch.acc.row(i);
    if (args.row_max.data != nullptr) {
      *args.row_max.at(batch, head, query + i) = scratch.row_max[i];
      *args.row_sum.at(batch, head, query + i) = scratch.row_sum[i];
      copy_row(acc, args.shape.value_dim, args.acc.at(batch, head, query + i));
    } else {
      *args.lse.at(batch, head, query + i) = finish_row(
          scratch.row_max[i], scratch.row_sum[i], acc, args.shape.value_dim, args.out.at(batch, head, query + i));
    }
  }
}

template <Products kProducts>
size_t attention_forward_scratch(const AttentionShape& shape) {
  return ForwardScratch<kProducts>(nullptr, shape).size;
}

template <typename T, Products kProducts>
void attention_forward(
    const AttentionForward<T>& args, int64_t batch, int64_t head, int64_t tile, std::byte* memory) {
  const TileRange& range = args.terms.ranges[batch * args.terms.range_batch_stride + tile];
  if (args.row_max.data != nullptr && range.low >= range.high) {
    return;  // nothing to add to the state: in a ring, most tiles see few of the other ranks' keys
  }
  const ForwardScratch<kProducts> scratch(memory, args.shape);
  const int64_t query = tile * kAttentionTile;
  const int64_t queries = std::min(kAttentionTile, args.shape.queries - query);
  copy_query_terms(
      args.terms, batch, query, queries, args.shape.keys, scratch.first, scratch.end, scratch.positions);
  begin_state<T, kProducts>(args, batch, head, query, queries, scratch);
  // Rows first, where keys will lie, then columns.
  const Matrix<Word<kProducts>> rows = scratch.k;
  copy_rows<kProducts>(args.q.at(batch, head, query), args.q.row_stride, queries, args.shape.head_dim, rows);
  transpose(rows, queries, words_of<kProducts>(args.shape.head_dim), scratch.q);
  walk_keys<T, kProducts>(args, batch, head, range, queries, scratch);
  store_state<T, kProducts>(args, batch, head, query, queries, scratch);
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
