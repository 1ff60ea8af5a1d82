// Checks of attention's tensors, and the kernels' view of them.
#pragma once

#include <c10/util/Exception.h>

#include <vector>

#include "arguments.h"
#include "attention.h"
#include "capability.h"
#include "kernels/attention.h"

namespace paracore {

// Throws ValueError, naming the argument, unless q, k and v fit each other.
AttentionShape check_inputs(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v);

// The terms, checked, with the memory that their pointers lead to.
class PreparedTerms {
 public:
  PreparedTerms(const AttentionTerms& terms, const at::Tensor& q, const AttentionShape& shape);

  LogitTerms terms;

 private:
  at::Tensor first_, end_, slopes_, query_positions_, key_positions_;
  std::vector<TileRange> ranges_;
};

struct Kernel {
  Capability capability;
  Products products;
};

// The kernel asked for, or the best. Throws ValueError if it cannot run here or does not multiply that dtype.
Kernel choose_kernel(const AttentionChoice& choice, at::ScalarType dtype);

// [batch, head, row, n], or [batch, head, row]. The kernels know bfloat16 by its bits.
template <typename T>
Rows<T> rows_of(const at::Tensor& tensor) {
  return {static_cast<T*>(const_cast<void*>(tensor.const_data_ptr())), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

Gradient gradient_of(const at::Tensor& tensor);

}  // namespace paracore
