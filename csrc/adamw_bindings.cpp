#include "adamw_bindings.h"

#include "cpu/adamw.h"

namespace paracore {

void bind_adamw(pybind11::module_& module) {
  namespace py = pybind11;
  using py::arg;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "adamw_", &adamw_, arg("parameter"), arg("gradient"), arg("first_moment"), arg("second_moment"),
      arg("max_second_moment").none(true), arg("master").none(true), arg("pieces"), arg("coefficients"),
      arg("gradient_scale"), arg("draws").none(true), arg("zero_gradient"), py::kw_only(),
      arg("capability") = py::none(), no_gil);
  module.def(
      "sum_of_squares", &sum_of_squares, arg("gradient"), arg("pieces"), py::kw_only(),
      arg("capability") = py::none(), no_gil);
}

}  // namespace paracore
