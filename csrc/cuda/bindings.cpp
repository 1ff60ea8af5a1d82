// paracore._CUDA: what Python sees of the CUDA sources. Documented in paracore/_CUDA.pyi.
//
// It includes pybind11 and the CUDA runtime, and nothing of torch: tensors come as addresses, streams as the
// integers that torch.cuda.Stream.cuda_stream gives.
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>

#include "stream_order.h"

namespace py = pybind11;

namespace {

void wait_for_counter(
    std::uintptr_t stream, std::uintptr_t counters, std::int32_t chunk, std::int32_t expected, double timeout_seconds) {
  if (!(timeout_seconds > 0 && timeout_seconds < 1e9)) {
    throw py::value_error(
        "timeout_seconds is " + std::to_string(timeout_seconds) + ", must be positive and less than 1e9");
  }
  const cudaError_t error = paracore::wait_for_counter(
      reinterpret_cast<cudaStream_t>(stream), reinterpret_cast<const std::int32_t*>(counters), chunk, expected,
      timeout_seconds);
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string("wait_for_counter cannot be launched: ") + cudaGetErrorString(error));
  }
}

}  // namespace

PYBIND11_MODULE(_CUDA, module) {
  module.def(
      "wait_for_counter", &wait_for_counter, py::arg("stream"), py::arg("counters"), py::arg("chunk"),
      py::arg("expected"), py::arg("timeout_seconds"), py::call_guard<py::gil_scoped_release>());
}
