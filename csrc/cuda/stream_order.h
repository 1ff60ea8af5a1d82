// Order between streams that CUDA's own events cannot express: they mark whole kernels, not parts of one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace paracore {

// What `stream`, of the current device, is given next waits until counters[chunk] has reached `expected`, and
// can then read whatever was written before the counter was raised with release semantics. Numbers are
// compared cyclically: a has reached b if the 32-bit difference a - b is not negative.
//
// One thread of the device waits. After `timeout_seconds` it prints which chunk it waited for, what it found
// and what it expected, and ends with a trap: every later call on the device then fails.
cudaError_t wait_for_counter(
    cudaStream_t stream,
    const std::int32_t* counters,
    std::int32_t chunk,
    std::int32_t expected,
    double timeout_seconds);

}  // namespace paracore
