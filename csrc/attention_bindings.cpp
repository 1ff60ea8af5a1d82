#include "attention_bindings.h"

#include <optional>
#include <string>
#include <vector>

#include "cpu/attention.h"

namespace paracore {

// Any integer of Python's, of which the lowest 64 bits count.
struct Seed {
  uint64_t bits;
};

}  // namespace paracore

namespace pybind11::detail {

template <>
struct type_caster<paracore::Seed> {
  PYBIND11_TYPE_CASTER(paracore::Seed, const_name("int"));

  bool load(handle source, bool /*convert*/) {
    if (!PyLong_Check(source.ptr())) {
      return false;
    }
    value.bits = PyLong_AsUnsignedLongLongMask(source.ptr());
    return true;
  }
};

}  // namespace pybind11::detail

namespace paracore {
namespace {

namespace py = pybind11;
using OptionalTensor = std::optional<at::Tensor>;
using OptionalName = std::optional<std::string>;

// Defines function(terms, choice, arguments...) with the terms and the choice as keyword-only arguments.
template <typename Result, typename... Arguments, typename... Names>
void define(
    py::module_& module, const char* name,
    Result (*function)(const AttentionTerms&, const AttentionChoice&, Arguments...), const Names&... names) {
  module.def(
      name,
      [function](
          Arguments... arguments, const at::Tensor& first, const at::Tensor& end, double scale, double softcap,
          const OptionalTensor& alibi_slopes, double dropout_p, Seed seed, int64_t first_batch, int64_t first_head,
          const OptionalTensor& query_positions, const OptionalTensor& key_positions, const OptionalName& capability,
          const OptionalName& products) {
        const AttentionTerms terms{
            first, end, scale, softcap, alibi_slopes, dropout_p, seed.bits, first_batch, first_head, query_positions,
            key_positions};
        return function(terms, {capability, products}, arguments...);
      },
      names..., py::kw_only(), py::arg("first"), py::arg("end"), py::arg("scale"), py::arg("softcap"),
      py::arg("alibi_slopes").none(true), py::arg("dropout_p"), py::arg("seed"), py::arg("first_batch"),
      py::arg("first_head"), py::arg("query_positions").none(true), py::arg("key_positions").none(true),
      py::arg("capability") = py::none(), py::arg("products") = py::none(),
      py::call_guard<py::gil_scoped_release>());
}

py::tuple as_tuple(const AttentionScratch& scratch) {
  return py::make_tuple(scratch.tiles, scratch.query_sums);
}

using Sizes = std::vector<int64_t>;

void bind_scratch(py::module_& module) {
  using py::arg;
  module.def(
      "attention_forward_scratch",
      [](at::ScalarType dtype, const Sizes& q, const Sizes& k, const Sizes& v) {
        return as_tuple(attention_forward_scratch({}, dtype, q, k, v));
      },
      arg("dtype"), arg("q"), arg("k"), arg("v"));
  module.def(
      "attention_backward_scratch",
      [](at::ScalarType dtype, const Sizes& q, const Sizes& k, const Sizes& v, bool dq_holds_sums) {
        return as_tuple(attention_backward_scratch({}, dtype, q, k, v, dq_holds_sums));
      },
      arg("dtype"), arg("q"), arg("k"), arg("v"), arg("dq_holds_sums"));
}

}  // namespace

void bind_attention(py::module_& module) {
  using py::arg;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("attention_key_tile", &attention_key_tile);
  define(module, "attention_forward", &attention_forward, arg("q"), arg("k"), arg("v"), arg("sink").none(true),
         arg("out"));
  define(module, "attention_continue", &attention_continue, arg("q"), arg("k"), arg("v"), arg("row_max"),
         arg("row_sum"), arg("acc"));
  module.def("attention_finish", &attention_finish, arg("row_max"), arg("row_sum"), arg("acc"), arg("out"),
             py::kw_only(), arg("capability") = py::none(), no_gil);
  module.def("attention_delta", &attention_delta, arg("out"), arg("dout"), py::kw_only(),
             arg("capability") = py::none(), no_gil);
  bind_scratch(module);
  define(module, "attention_backward", &attention_backward, arg("dout"), arg("q"), arg("k"), arg("v"), arg("lse"),
         arg("delta"), arg("dq"), arg("dk"), arg("dv"), arg("accumulate"));
}

}  // namespace paracore
