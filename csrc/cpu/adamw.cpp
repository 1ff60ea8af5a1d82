// Checks tensors and divides pieces among threads; the mathematics is in kernels/adamw.cpp.
#include "adamw.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "kernels/adamw.h"

namespace paracore {
namespace {

// As PIECE of paracore/reference_adamw.py.
constexpr int64_t kPiece = 4096;
// Fewer elements than this are not worth a thread of their own (ATen uses the same figure).
constexpr int64_t kElementsPerTask = 32768;

void check_contiguous(const at::Tensor& tensor, const char* name, at::ScalarType dtype, at::IntArrayRef sizes) {
  TORCH_CHECK_VALUE(
      tensor.device().is_cpu() && tensor.scalar_type() == dtype && tensor.sizes() == sizes, name, " is ",
      tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device(), ", must be ", dtype, " ", sizes,
      " on the CPU");
  TORCH_CHECK_VALUE(tensor.is_contiguous(), name, " has strides ", tensor.strides(), ", must be contiguous");
}

// Returns whether it is float32.
bool check_wide_or_narrow(const at::Tensor& tensor, const char* name, int64_t length) {
  const auto dtype = tensor.scalar_type();
  TORCH_CHECK_VALUE(
      dtype == at::kFloat || dtype == at::kBFloat16, name, " is ", dtype, ", must be float32 or bfloat16");
  check_contiguous(tensor, name, dtype, {length});
  return dtype == at::kFloat;
}

AdamWMaster check_master(const std::optional<at::Tensor>& master, const at::Tensor& parameter) {
  if (!master) {
    return AdamWMaster::kNone;
  }
  const auto dtype = master->scalar_type();
  TORCH_CHECK_VALUE(dtype == at::kFloat || dtype == at::kShort, "master is ", dtype, ", must be float32 or int16");
  TORCH_CHECK_VALUE(
      parameter.scalar_type() == at::kBFloat16, "master is ", dtype, ", must be None: the parameter is ",
      parameter.scalar_type(), " and not bfloat16");
  check_contiguous(*master, "master", dtype, parameter.sizes());
  return dtype == at::kFloat ? AdamWMaster::kFloat32 : AdamWMaster::kRemainder;
}

void check_pieces(const at::Tensor& pieces, int64_t length, int64_t segments) {
  TORCH_CHECK_VALUE(pieces.dim() == 2, "pieces has shape ", pieces.sizes(), ", must be [n, 3]");
  check_contiguous(pieces, "pieces", at::kLong, {pieces.size(0), kPieceColumns});
  const int64_t* row = pieces.const_data_ptr<int64_t>();
  for (int64_t piece = 0; piece < pieces.size(0); ++piece, row += kPieceColumns) {
    TORCH_CHECK_VALUE(
        0 <= row[0] && row[0] <= row[1] && row[1] <= length, "pieces[", piece, "] is from ", row[0], " to ", row[1],
        ", must be within the ", length, " elements");
    TORCH_CHECK_VALUE(
        row[1] - row[0] <= kPiece, "pieces[", piece, "] has ", row[1] - row[0], " elements, must have at most ", kPiece);
    TORCH_CHECK_VALUE(
        0 <= row[2] && row[2] < segments, "pieces[", piece, "] is of segment ", row[2], ", must be one of the ",
        segments, " of coefficients");
  }
}

void check_draws(const at::Tensor& draws, int64_t segments, AdamWMaster master) {
  TORCH_CHECK_VALUE(
      master != AdamWMaster::kRemainder, "draws is given, must be None with an int16 master: that loses nothing");
  check_contiguous(draws, "draws", at::kLong, {segments, kDrawColumns});
  const int64_t* row = draws.const_data_ptr<int64_t>();
  for (int64_t segment = 0; segment < segments; ++segment, row += kDrawColumns) {
    TORCH_CHECK_VALUE(
        row[3] >= 0 && row[4] >= 1, "draws[", segment, "] has origin ", row[3], " and inner ", row[4],
        ", must be at least 0 and 1");
  }
}

// Calls body(begin, end) for ranges of pieces of about equally many elements, one for each thread. Ranges, for
// streams of memory that go on; and the same in every call, for memory that lies near its thread.
template <typename Body>
void share(const at::Tensor& pieces, const Body& body) {
  const int64_t* const table = pieces.const_data_ptr<int64_t>();
  const int64_t count = pieces.size(0);
  const auto size = [=](int64_t piece) {
    return table[piece * kPieceColumns + 1] - table[piece * kPieceColumns];
  };
  int64_t elements = 0;
  for (int64_t piece = 0; piece < count; ++piece) {
    elements += size(piece);
  }
  const int64_t threads = std::clamp<int64_t>(elements / kElementsPerTask, 1, at::get_num_threads());
  std::vector<int64_t> begins{0};
  int64_t before = 0;
  for (int64_t piece = 0; piece < count; ++piece) {
    before += size(piece);
    while (before * threads >= elements * static_cast<int64_t>(begins.size()) &&
           static_cast<int64_t>(begins.size()) < threads) {
      begins.push_back(piece + 1);
    }
  }
  begins.resize(threads, count);
  begins.push_back(count);
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) { body(begins[begin], begins[end]); });
}

}  // namespace

void adamw_(
    const at::Tensor& parameter,
    const at::Tensor& gradient,
    const at::Tensor& first_moment,
    const at::Tensor& second_moment,
    const std::optional<at::Tensor>& max_second_moment,
    const std::optional<at::Tensor>& master,
    const at::Tensor& pieces,
    const at::Tensor& coefficients,
    const at::Tensor& gradient_scale,
    const std::optional<at::Tensor>& draws,
    bool zero_gradient,
    const std::optional<std::string>& capability) {
  TORCH_CHECK_VALUE(parameter.dim() == 1, "parameter has shape ", parameter.sizes(), ", must have one dim");
  const int64_t length = parameter.size(0);
  AdamW args{};
  args.wide_parameter = check_wide_or_narrow(parameter, "parameter", length);
  args.wide_gradient = check_wide_or_narrow(gradient, "gradient", length);
  args.wide_moments = check_wide_or_narrow(first_moment, "first_moment", length);
  check_contiguous(second_moment, "second_moment", first_moment.scalar_type(), {length});
  if (max_second_moment) {
    check_contiguous(*max_second_moment, "max_second_moment", first_moment.scalar_type(), {length});
  }
  args.master_kind = check_master(master, parameter);
  TORCH_CHECK_VALUE(
      coefficients.dim() == 2, "coefficients has shape ", coefficients.sizes(), ", must be [segments, 10]");
  const int64_t segments = coefficients.size(0);
  check_contiguous(coefficients, "coefficients", at::kDouble, {segments, kCoefficientColumns});
  check_contiguous(gradient_scale, "gradient_scale", at::kDouble, {1});
  check_pieces(pieces, length, segments);
  if (draws) {
    check_draws(*draws, segments, args.master_kind);
  }
  const auto kernel = PARACORE_VARIANT(choose_capability(capability), adamw);

  args.parameter = parameter.mutable_data_ptr();
  args.gradient = zero_gradient ? gradient.mutable_data_ptr() : const_cast<void*>(gradient.const_data_ptr());
  args.first_moment = first_moment.mutable_data_ptr();
  args.second_moment = second_moment.mutable_data_ptr();
  args.max_second_moment = max_second_moment ? max_second_moment->mutable_data_ptr() : nullptr;
  args.master = master ? master->mutable_data_ptr() : nullptr;
  args.zero_gradient = zero_gradient;
  args.gradient_scale = static_cast<float>(*gradient_scale.const_data_ptr<double>());
  args.pieces = pieces.const_data_ptr<int64_t>();
  args.coefficients = coefficients.const_data_ptr<double>();
  args.draws = draws ? draws->const_data_ptr<int64_t>() : nullptr;
  share(pieces, [&](int64_t begin, int64_t end) { kernel(args, begin, end); });
}

at::Tensor sum_of_squares(
    const at::Tensor& gradient, const at::Tensor& pieces, const std::optional<std::string>& capability) {
  TORCH_CHECK_VALUE(gradient.dim() == 1, "gradient has shape ", gradient.sizes(), ", must have one dim");
  const bool wide = check_wide_or_narrow(gradient, "gradient", gradient.size(0));
  check_pieces(pieces, gradient.size(0), std::numeric_limits<int64_t>::max());
  const auto kernel = PARACORE_VARIANT(choose_capability(capability), sum_of_squares);
  const at::Tensor sums = at::empty({pieces.size(0)}, gradient.options().dtype(at::kDouble));
  const void* const numbers = gradient.const_data_ptr();
  const int64_t* const table = pieces.const_data_ptr<int64_t>();
  double* const to = sums.mutable_data_ptr<double>();
  share(pieces, [&](int64_t begin, int64_t end) { kernel(numbers, wide, table, begin, end, to); });
  return sums;
}

}  // namespace paracore
