#include "layers_bindings.h"

#include "cpu/cross_entropy.h"
#include "cpu/embedding.h"
#include "cpu/fresh.h"
#include "cpu/rotary.h"
#include "cpu/swiglu.h"

namespace paracore {

void bind_layers(pybind11::module_& module) {
  namespace py = pybind11;
  using py::arg;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def(
      "cross_entropy_statistics", &cross_entropy_statistics, arg("logits"), arg("labels"), py::kw_only(),
      arg("capability") = py::none(), no_gil);
  module.def(
      "cross_entropy_gradient", &cross_entropy_gradient, arg("logits"), arg("labels"), arg("maximum"),
      arg("log_sum"), arg("coefficients"), arg("dlogits"), py::kw_only(), arg("capability") = py::none(), no_gil);
  module.def(
      "swiglu_forward", &swiglu_forward, arg("gate"), arg("up"), py::kw_only(), arg("out") = py::none(),
      arg("capability") = py::none(), no_gil);
  module.def(
      "swiglu_backward", &swiglu_backward, arg("dy"), arg("gate"), arg("up"), py::kw_only(),
      arg("out") = py::none(), arg("capability") = py::none(), no_gil);
  module.def(
      "rotate_pair", &rotate_pair, arg("q"), arg("k"), arg("cos"), arg("sin"), arg("positions"), arg("q_out"),
      arg("k_out"), arg("inverse"), py::kw_only(), arg("capability") = py::none(), no_gil);
  module.def(
      "embedding_gradient", &embedding_gradient, arg("dy"), arg("tokens"), arg("vocab_size"), py::kw_only(),
      arg("capability") = py::none(), no_gil);
  module.def("prefault", &prefault, arg("tensor"));
  module.def(
      "embedding_gradient_scratch", &embedding_gradient_scratch, arg("tokens"), arg("vocab_size"));
}

}  // namespace paracore
