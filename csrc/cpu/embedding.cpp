// Checks tensors, sorts tokens by the row they add to and deals rows out to threads; sums are taken in
// kernels/embedding.cpp.
#include "embedding.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "arguments.h"
#include "fresh.h"
#include "kernels/embedding.h"
#include "threads.h"

namespace paracore {
namespace {

// Columns that a thread takes where most tokens are of one row, as padding is: many threads share it then.
constexpr int64_t kFewColumns = 128;

// The beginning of each row, and two places ahead in which it is counted.
constexpr int64_t begins_of(int64_t rows) {
  return rows + 2;
}

// Tokens sorted by row, each row's in ascending order: those of row r are order[begins[r]] to order[begins[r + 1]].
// Tokens outside the rows are left out.
struct Sorted {
  Sorted(const at::Tensor& tokens, int64_t rows)
      : rows(rows), begins(at::empty({begins_of(rows)}, tokens.options())), order(at::empty(tokens.sizes(), tokens.options())) {
    const int64_t* const token = read_from<int64_t>(tokens);
    const auto inside = [=](int64_t i) { return 0 <= token[i] && token[i] < rows; };
    int64_t* const begin = written_to<int64_t>(begins);
    int64_t* const to = written_to<int64_t>(order);
    // Counts two places ahead; summed, the beginning of row r is one place ahead, and where it is once row r's
    // tokens are dealt out.
    std::fill_n(begin, begins_of(rows), 0);
    for (int64_t i = 0; i < tokens.size(0); ++i) {
      if (inside(i)) {
        most = std::max(most, ++begin[token[i] + 2]);
      }
    }
    for (int64_t row = 0; row < rows; ++row) {
      begin[row + 2] += begin[row + 1];
    }
    for (int64_t i = 0; i < tokens.size(0); ++i) {
      if (inside(i)) {
        to[begin[token[i] + 1]++] = i;
      }
    }
  }

  // The first row before which there are at least that many rows and tokens.
  int64_t row_at(int64_t work) const {
    const int64_t* const begin = read_from<int64_t>(begins);
    int64_t low = 0, high = rows;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      (begin[middle] + middle < work) ? low = middle + 1 : high = middle;
    }
    return low;
  }

  int64_t rows;
  int64_t most = 0;  // tokens of one row
  at::Tensor begins, order;
};

}  // namespace

int64_t embedding_gradient_scratch(int64_t tokens, int64_t vocab_size) {
  return (begins_of(vocab_size) + tokens) * static_cast<int64_t>(sizeof(int64_t));
}

at::Tensor embedding_gradient(
    const at::Tensor& dy,
    const at::Tensor& tokens,
    int64_t vocab_size,
    const std::optional<std::string>& capability) {
  check_wide_or_narrow(dy, "dy", 2);
  check_rows(tokens, "tokens", at::kLong, {dy.size(0)});
  TORCH_CHECK_VALUE(vocab_size >= 0, "vocab_size=", vocab_size, ", must be at least 0");
  const Capability variant = choose_capability(capability);
  const int64_t size = dy.size(1);
  const at::Tensor total = fresh({vocab_size, size}, dy.options());
  if (total.numel() == 0) {
    return total;
  }
  const Sorted sorted(tokens, vocab_size);
  const int64_t work = vocab_size + dy.size(0);  // in rows, read or written
  // Which thread sums what changes no bit: a column's sum is its own.
  const bool crowded = sorted.most > work / at::get_num_threads();
  const int64_t columns = std::min(size, crowded ? kFewColumns : kEmbeddingColumns);
  const int64_t groups = (size + columns - 1) / columns;
  const int64_t work_per_piece = std::max<int64_t>(1, kElementsPerTask / columns);
  const int64_t pieces = (work + work_per_piece - 1) / work_per_piece;
  dispatch_wide_or_narrow(dy, [&](auto* t) {
    using T = std::remove_pointer_t<decltype(t)>;
    const EmbeddingGradient<T> args{
        read_from<T>(dy),    read_from<int64_t>(sorted.begins), read_from<int64_t>(sorted.order),
        written_to<T>(total), size,                             dy.stride(0)};
    const auto kernel = PARACORE_VARIANT(variant, embedding_gradient<T>);
    deal(pieces * groups, [&](int64_t item) {
      const int64_t piece = item / groups, column = item % groups * columns;
      const int64_t begin = sorted.row_at(piece * work_per_piece), end = sorted.row_at((piece + 1) * work_per_piece);
      kernel(args, begin, end, column, std::min(columns, size - column));
    });
  });
  return total;
}

}  // namespace paracore
