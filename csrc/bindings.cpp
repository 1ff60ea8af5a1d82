// paracore._C: what Python sees of the native kernels. Documented in paracore/_C.pyi.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include <mutex>
#include <set>
#include <thread>

#include "adamw_bindings.h"
#include "attention_bindings.h"
#include "cpu/capability.h"
#include "cpu/rms_norm.h"
#include "layers_bindings.h"

namespace py = pybind11;

namespace {

// torch promises no binary compatibility between minor versions: a mismatch can crash, so it must not load.
void require_torch_as_built() {
  const auto running = py::module_::import("torch").attr("__version__").cast<std::string>();
  const std::string built = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + ".";
  if (running.compare(0, built.size(), built) != 0) {
    throw py::import_error("paracore._C was built for torch " TORCH_VERSION " but torch " + running +
                           " is running; rebuild it with: pip install --no-build-isolation --no-deps -e .");
  }
}

std::vector<std::string> capability_names() {
  std::vector<std::string> names;
  for (const auto capability : paracore::supported_capabilities()) {
    names.push_back(paracore::name_of(capability));
  }
  return names;
}

// The number of threads among which parallel_for divides work. One, always, if this file was not
// compiled with OpenMP or if torch's OpenMP is not the one it is bound to: a test looks.
int64_t count_threads() {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t, int64_t) {
    const std::lock_guard<std::mutex> guard(mutex);
    threads.insert(std::this_thread::get_id());
  });
  return static_cast<int64_t>(threads.size());
}

py::dict build_info() {
  py::dict info;
  info["torch"] = TORCH_VERSION;
  info["compiler"] = __VERSION__;
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  require_torch_as_built();
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("capabilities", &capability_names);
  module.def("count_threads", &count_threads, no_gil);
  module.def("build_info", &build_info);
  module.def(
      "rms_norm_forward", &paracore::rms_norm_forward, py::arg("x"), py::arg("weight"), py::arg("residual").none(true),
      py::arg("eps"), py::kw_only(), py::arg("out") = py::none(), py::arg("capability") = py::none(), no_gil);
  module.def(
      "rms_norm_backward", &paracore::rms_norm_backward, py::arg("dy"), py::arg("dh").none(true), py::arg("h"),
      py::arg("weight"), py::arg("rstd"), py::kw_only(), py::arg("out") = py::none(),
      py::arg("capability") = py::none(), no_gil);
  module.def(
      "rms_norm_forward_scratch", &paracore::rms_norm_forward_scratch, py::arg("hidden"), py::arg("weight_dtype"));
  module.def(
      "rms_norm_backward_scratch", &paracore::rms_norm_backward_scratch, py::arg("rows"), py::arg("hidden"),
      py::arg("weight_dtype"));
  paracore::bind_attention(module);
  paracore::bind_adamw(module);
  paracore::bind_layers(module);
}
