#include "capability.h"

#include <ATen/Version.h>
#include <c10/util/Exception.h>

namespace paracore {

std::vector<Capability> supported_capabilities() {
  std::vector<Capability> supported{Capability::kDefault};
#ifdef PARACORE_X86_VARIANTS
  // ATen has asked the processor and the operating system already, and it honours ATEN_CPU_CAPABILITY.
  const std::string best = at::get_cpu_capability();
  if (best == "AVX2" || best == "AVX512") {
    supported.push_back(Capability::kAvx2);
  }
  if (best == "AVX512") {
    supported.push_back(Capability::kAvx512);
  }
#endif
  return supported;
}

Capability choose_capability(const std::optional<std::string>& name) {
  const auto supported = supported_capabilities();
  if (!name) {
    return supported.back();
  }
  std::string names;
  for (const Capability capability : supported) {
    if (name_of(capability) == *name) {
      return capability;
    }
    names += (names.empty() ? "" : ", ") + name_of(capability);
  }
  TORCH_CHECK_VALUE(false, "capability=", *name, " cannot run here; this build and processor have: ", names);
}

std::string name_of(Capability capability) {
  switch (capability) {
    case Capability::kAvx512:
      return "avx512";
    case Capability::kAvx2:
      return "avx2";
    case Capability::kDefault:
      return "default";
  }
  TORCH_CHECK(false, "no such capability: ", static_cast<int>(capability));
}

}  // namespace paracore
