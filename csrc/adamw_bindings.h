// The optimizer's part of the module paracore._C.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace paracore {

void bind_adamw(pybind11::module_& module);

}  // namespace paracore
