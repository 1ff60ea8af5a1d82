// Cross entropy: statistics by an online maximum (Milakov & Gimelshein 2018), gradient from them; each reads the
// logits once.
#include "cross_entropy.h"

#include <cmath>
#include <limits>

#include "elements.h"
#include "exponential.h"

namespace paracore {
namespace CPU_CAPABILITY {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Elements between two looks at the running maximum: few enough that the second walk finds them in the first cache,
// enough that what is done once per block costs nothing.
constexpr int64_t kBlock = 1024;
// Vectors whose exponentials are taken together, and independent ones of a sum.
constexpr int kVectors = 4;

// Passes over what is not a number.
template <typename T>
inline float maximum_of_block(const T* logits, int64_t size) {
  Floats maxima[kVectors];
  std::fill_n(maxima, kVectors, fill(-kInfinity));
  for_each_vectors<kVectors>(size, [&](int64_t i, auto vectors, auto count) {
    const Words lanes = first_lanes(count);
    for (int v = 0; v < vectors; ++v) {
      const Floats x = read(logits + i + v * kLanes, count);
      maxima[v] = larger((Floats)(((Words)x & lanes) | ((Words)fill(-kInfinity) & ~lanes)), maxima[v]);
    }
  });
  const Floats all = larger(larger(maxima[0], maxima[1]), larger(maxima[2], maxima[3]));
  float maximum = all[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    maximum = std::max(maximum, all[lane]);
  }
  return maximum;
}

inline double sum(const Floats (&parts)[kVectors]) {
  const Floats all = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    total += all[lane];
  }
  return total;
}

// Statistics of the logits so far. Sums of blocks are added in float64: a million logits lose nothing.
class Running {
 public:
  template <typename T>
  void add_block(const T* logits, int64_t size) {
    raise(maximum_of_block(logits, size));
    const Floats shift = fill(maximum_ == -kInfinity ? 0.f : maximum_);
    Floats exponentials[kVectors] = {}, differences[kVectors] = {};
    for_each_vectors<kVectors>(size, [&](int64_t i, auto vectors, auto count) {
      const Words lanes = first_lanes(count);
      Floats difference[vectors], exponential[vectors];
      for (int v = 0; v < vectors; ++v) {
        // Of the next block, which may lie beyond the tensor: nothing is read.
        __builtin_prefetch(logits + kBlock + i + v * kLanes);
        difference[v] = (Floats)((Words)(read(logits + i + v * kLanes, count) - shift) & lanes);
        differences[v] = differences[v] + difference[v];
      }
      exp_up_to_88(difference, exponential);
      for (int v = 0; v < vectors; ++v) {
        exponentials[v] = exponentials[v] + (Floats)((Words)exponential[v] & lanes);
      }
    });
    sum_ += sum(exponentials);
    off_ += sum(differences);
    count_ += size;
  }

  // What is not a number makes the sum so, and then only an infinite maximum does: inf - inf.
  template <typename T>
  float maximum(const T* logits, int64_t size) const {
    if (sum_ == sum_) {
      return maximum_;
    }
    const auto not_a_number = [](T bits) { return std::isnan(widen(bits)); };
    const bool found = maximum_ < kInfinity || std::any_of(logits, logits + size, not_a_number);
    return found ? std::numeric_limits<float>::quiet_NaN() : maximum_;
  }

  float sum_of_exponentials() const { return static_cast<float>(sum_); }
  float sum_of_differences() const { return static_cast<float>(off_); }

 private:
  void raise(float maximum) {
    if (!(maximum > maximum_)) {
      return;
    }
    if (maximum_ != -kInfinity) {  // or all so far was -inf or not a number, whose sums stay as they are
      const double rise = static_cast<double>(maximum) - maximum_;
      sum_ *= std::exp(-rise);
      off_ -= static_cast<double>(count_) * rise;
    }
    maximum_ = maximum;
  }

  float maximum_ = -kInfinity;
  double sum_ = 0, off_ = 0;
  int64_t count_ = 0;
};

// exp(logit - maximum - log_sum) * softmax - everywhere, of vectors of one row.
struct RowGradient {
  Floats maximum, log_sum, softmax, everywhere;

  template <int count>
  void operator()(Floats (&x)[count]) const {
    for (int v = 0; v < count; ++v) {
      x[v] = (x[v] - maximum) - log_sum;
    }
    exp(x, x);
    for (int v = 0; v < count; ++v) {
      x[v] = x[v] * softmax - everywhere;
    }
  }
};

}  // namespace

template <typename T>
void cross_entropy_statistics(const CrossEntropyStatistics<T>& args, int64_t begin, int64_t end) {
  const int64_t size = args.size;
  for (int64_t token = begin; token < end; ++token) {
    const T* const logits = args.logits + token * args.stride;
    Running running;
    for (int64_t first = 0; first < size; first += kBlock) {
      running.add_block(logits + first, std::min(kBlock, size - first));
    }
    const int64_t label = args.labels[token];
    float* const to = args.statistics + token;
    to[0] = running.maximum(logits, size);
    to[args.tokens] = running.sum_of_exponentials();
    to[2 * args.tokens] = 0 <= label && label < size ? widen(logits[label]) : 0.f;
    to[3 * args.tokens] = running.sum_of_differences();
  }
}

template <typename T>
void cross_entropy_gradient(const CrossEntropyGradient<T>& args, int64_t begin, int64_t end) {
  const int64_t size = args.size;
  for (int64_t token = begin; token < end; ++token) {
    const T* const logits = args.logits + token * args.stride;
    T* const dlogits = args.dlogits + token * args.dlogits_stride;
    const float softmax = args.coefficients[token];
    const float at_label = args.coefficients[args.tokens + token];
    const float everywhere = args.coefficients[2 * args.tokens + token];
    if (softmax == 0 && at_label == 0 && everywhere == 0) {
      std::fill_n(dlogits, size, T{});
      continue;
    }
    const int64_t label = args.labels[token];
    const bool inside = 0 <= label && label < size;
    const float label_logit = inside ? widen(logits[label]) : 0.f;  // before it may be written over
    const RowGradient gradient{
        fill(args.maximum[token]), fill(args.log_sum[token]), fill(softmax), fill(everywhere)};
    for_each_vectors<kVectors>(size, [=](int64_t i, auto vectors, auto count) {
      Floats x[vectors];
      for (int v = 0; v < vectors; ++v) {
        x[v] = read(logits + i + v * kLanes, count);
      }
      gradient(x);
      for (int v = 0; v < vectors; ++v) {
        write(dlogits + i + v * kLanes, x[v], count);
      }
    });
    if (inside) {
      const RowGradient there{gradient.maximum, gradient.log_sum, gradient.softmax, fill(at_label)};
      Floats x[1] = {fill(label_logit)};
      there(x);
      write(dlogits + label, x[0] - everywhere, int64_t{1});
    }
  }
}

template void cross_entropy_statistics<float>(const CrossEntropyStatistics<float>&, int64_t, int64_t);
template void cross_entropy_statistics<uint16_t>(const CrossEntropyStatistics<uint16_t>&, int64_t, int64_t);
template void cross_entropy_gradient<float>(const CrossEntropyGradient<float>&, int64_t, int64_t);
template void cross_entropy_gradient<uint16_t>(const CrossEntropyGradient<uint16_t>&, int64_t, int64_t);

}  // namespace CPU_CAPABILITY
}  // namespace paracore
