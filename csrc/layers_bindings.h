// The part of the module paracore._C that layers other than attention use.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace paracore {

void bind_layers(pybind11::module_& module);

}  // namespace paracore
