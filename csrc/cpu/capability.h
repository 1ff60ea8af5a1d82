// Which instruction sets a kernel was compiled for, and which of them runs.
//
// Every file in cpu/kernels/ is compiled once per capability, with CPU_CAPABILITY naming a namespace; the
// processor decides at run time. This is ATen's scheme (native/DispatchStub.h), so at::vec picks its width.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace paracore {

enum class Capability { kDefault, kAvx2, kAvx512 };

// The capabilities in this binary that this processor can run, worst first.
std::vector<Capability> supported_capabilities();

// The best one, or the one asked for by name: "default", "avx2", "avx512". Throws when it cannot run here.
Capability choose_capability(const std::optional<std::string>& name);

std::string name_of(Capability capability);

}  // namespace paracore

// Declares something in the namespace of every capability in this binary.
// PARACORE_VARIANT(capability, function) is the pointer to that capability's function.
#ifdef PARACORE_X86_VARIANTS
#define PARACORE_DECLARE_VARIANTS(...) \
  namespace DEFAULT {                  \
  __VA_ARGS__                          \
  }                                    \
  namespace AVX2 {                     \
  __VA_ARGS__                          \
  }                                    \
  namespace AVX512 {                   \
  __VA_ARGS__                          \
  }
#define PARACORE_VARIANT(capability, ...)                          \
  ((capability) == ::paracore::Capability::kAvx512 ? &AVX512::__VA_ARGS__ \
   : (capability) == ::paracore::Capability::kAvx2 ? &AVX2::__VA_ARGS__   \
                                                   : &DEFAULT::__VA_ARGS__)
#else
#define PARACORE_DECLARE_VARIANTS(...) \
  namespace DEFAULT {                  \
  __VA_ARGS__                          \
  }
// Both branches are the same: after a comma, a template's address would have no type to be deduced from.
#define PARACORE_VARIANT(capability, ...) \
  ((capability) == ::paracore::Capability::kDefault ? &DEFAULT::__VA_ARGS__ : &DEFAULT::__VA_ARGS__)
#endif
