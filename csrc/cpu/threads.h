// Work dealt to threads one piece at a time, and memory that each thread keeps.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

namespace paracore {

// Among how many threads so many items are dealt.
inline int64_t threads_for(int64_t items) {
  return std::min<int64_t>(items, at::get_num_threads());
}

// Calls body(item) for each item of [0, items). A thread takes the next item when it is done with one, in
// ascending order: pieces of unequal work, the long ones first, keep all threads busy to the end.
template <typename Body>
void deal(int64_t items, const Body& body) {
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads_for(items), 1, [&](int64_t, int64_t) {
    for (int64_t item = next++; item < items; item = next++) {
      body(item);
    }
  });
}

// Memory of this thread, aligned to cache lines, kept from call to call: a fresh page costs more than the work
// on it. Its contents are not. `kPurpose` tells buffers apart that are in use together.
template <int kPurpose>
std::byte* thread_memory(size_t size) {
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  static thread_local std::unique_ptr<std::byte, Free> memory;
  static thread_local size_t capacity = 0;
  if (size > capacity) {
    capacity = (size + 63) / 64 * 64;
    memory.reset(static_cast<std::byte*>(std::aligned_alloc(64, capacity)));
    if (memory == nullptr) {
      capacity = 0;
      throw std::bad_alloc();
    }
  }
  return memory.get();
}

}  // namespace paracore
