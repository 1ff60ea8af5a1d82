#include "stream_order.h"

#include <cstdio>

namespace paracore {
namespace {

constexpr unsigned FIRST_PAUSE_NS = 32;
// A counter that was reached is noticed at most so late: little beside the copy of a chunk, and a poll that
// rare takes nothing from the kernel that is waited for.
constexpr unsigned LONGEST_PAUSE_NS = 1024;

__device__ std::int32_t load_acquire(const std::int32_t* address) {
  std::int32_t value;
  asm volatile("ld.acquire.sys.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ bool has_reached(std::int32_t found, std::int32_t expected) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(found) - static_cast<std::uint32_t>(expected)) >= 0;
}

// extern "C": `paracore kernels` prints this name.
extern "C" __global__ void __launch_bounds__(1) wait_for_counter_kernel(
    const std::int32_t* counters, std::int32_t chunk, std::int32_t expected, std::uint64_t timeout_ns) {
  const std::uint64_t start = nanoseconds();
  unsigned pause = FIRST_PAUSE_NS;
  std::int32_t found = load_acquire(counters + chunk);
  while (!has_reached(found, expected)) {
    if (nanoseconds() - start > timeout_ns) {
      printf(
          "paracore: waited %llu ms for chunk %d: its counter is %d, expected %d\n",
          static_cast<unsigned long long>(timeout_ns / 1000000), chunk, found, expected);
      __trap();
    }
    __nanosleep(pause);
    pause = min(2 * pause, LONGEST_PAUSE_NS);
    found = load_acquire(counters + chunk);
  }
}

}  // namespace

cudaError_t wait_for_counter(
    cudaStream_t stream,
    const std::int32_t* counters,
    std::int32_t chunk,
    std::int32_t expected,
    double timeout_seconds) {
  const auto timeout_ns = static_cast<std::uint64_t>(timeout_seconds * 1e9);
  wait_for_counter_kernel<<<1, 1, 0, stream>>>(counters, chunk, expected, timeout_ns);
  return cudaGetLastError();
}

}  // namespace paracore
