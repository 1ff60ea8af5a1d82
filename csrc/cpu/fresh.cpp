#include "fresh.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace paracore {
namespace {

// Smaller tensors lie in memory that was in use before, as a rule.
constexpr size_t kLarge = size_t{4} << 20;
// Of one call: small enough for threads to share the work evenly.
constexpr int64_t kPiece = int64_t{2} << 20;

}  // namespace

void prefault(const at::Tensor& tensor) {
#ifdef MADV_POPULATE_WRITE
  if (!tensor.device().is_cpu() || tensor.nbytes() < kLarge) {
    return;
  }
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + tensor.nbytes()) / page * page;
  const auto bytes = static_cast<int64_t>(end - begin);
  at::parallel_for(0, (bytes + kPiece - 1) / kPiece, 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      const int64_t offset = piece * kPiece;
      // An older system refuses: its pages come as they are written.
      madvise(reinterpret_cast<void*>(begin + offset), std::min(kPiece, bytes - offset), MADV_POPULATE_WRITE);
    }
  });
#endif
}

at::Tensor fresh(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::Tensor tensor = at::empty(sizes, options);
  prefault(tensor);
  return tensor;
}

}  // namespace paracore
