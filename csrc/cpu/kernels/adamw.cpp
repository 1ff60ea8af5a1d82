// AdamW (Kingma & Ba 2015; Loshchilov & Hutter 2019): every number is read once and written once.
//
// No operation is fused and each is rounded as IEEE 754 asks, in the order of paracore/reference_adamw.py: so
// the bits are the reference's, whatever the width of the vectors and wherever a piece begins.
#include "adamw.h"

#include <algorithm>
#include <type_traits>

#include "philox.h"
#include "vector.h"

namespace paracore {
namespace CPU_CAPABILITY {
namespace {

struct NoMaster {};

// What an element consists of. P, G and M are float, or uint16_t for the bits of a bfloat16; the master K is
// NoMaster, float or the int16_t remainder. Pointers to what there is not are null.
template <typename P, typename K, typename G, typename M>
struct Streams {
  P* parameter;
  K* master;
  G* gradient;
  M* first_moment;
  M* second_moment;
  M* max_second_moment;
};

// A row of the table, in every lane.
struct Coefficients {
  Coefficients(const double* row, float gradient_scale)
      : active(static_cast<float>(row[0]) != 0),
        scale(fill(static_cast<float>(row[1]) * gradient_scale)),
        l2(fill(static_cast<float>(row[2]))),
        shrink(fill(static_cast<float>(row[3]))),
        one_minus_beta1(fill(static_cast<float>(row[4]))),
        beta2(fill(static_cast<float>(row[5]))),
        one_minus_beta2(fill(static_cast<float>(row[6]))),
        step_size(fill(static_cast<float>(row[7]))),
        root_bias2(fill(static_cast<float>(row[8]))),
        eps(fill(static_cast<float>(row[9]))) {}

  bool active;
  Floats scale, l2, shrink, one_minus_beta1, beta2, one_minus_beta2, step_size, root_bias2, eps;
};

// Which word of an element's random numbers rounds what.
enum Word { kParameter, kFirstMoment, kSecondMoment, kMaxSecondMoment };

struct Nearest {
  void advance() {}
  Words round(const Floats& value, Word /*word*/) const { return round_to_bfloat16(value); }
};

// The upper half of each lane is the result, as round_to_bfloat16's.
class Stochastic {
 public:
  Stochastic(const int64_t* row, int64_t begin)
      : key0_(static_cast<uint32_t>(row[0])),
        key1_(static_cast<uint32_t>(row[1])),
        step_(static_cast<uint32_t>(row[2])),
        inner_(row[4]),
        skipped_(row[5] - row[4]),
        column_((begin + row[3]) % row[4]),
        index_((begin + row[3]) / row[4] * row[5] + row[6] + column_) {}

  // To the next vector of elements. Counting on costs less than a division for each.
  void advance() {
    alignas(64) uint32_t low[kLanes], high[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      low[lane] = static_cast<uint32_t>(index_);
      high[lane] = static_cast<uint32_t>(static_cast<uint64_t>(index_) >> 32);
      ++index_;
      if (++column_ == inner_) {
        column_ = 0;
        index_ += skipped_;
      }
    }
    random_ = philox_words(load<Words>(low), load<Words>(high), fill(step_), Words{}, key0_, key1_);
  }

  Words round(const Floats& value, Word word) const {
    const Words bits = (Words)value;
    const Words cut = (bits + (random_.word[word] >> 16)) & 0xffff0000u;
    return (bits & 0x7f800000u) != 0x7f800000u ? cut : round_to_bfloat16(value);
  }

 private:
  uint32_t key0_, key1_, step_;
  int64_t inner_, skipped_, column_, index_;  // of the next element
  RandomWords random_;
};

inline Floats read(const float* from) {
  return load<Floats>(from);
}

inline Floats read(const uint16_t* from) {
  return (Floats)(widen_halves(load<Halves>(from)) << 16);
}

template <typename Rounding>
inline void write(float* to, const Floats& value, const Rounding& /*rounding*/, Word /*word*/) {
  store(to, value);
}

template <typename Rounding>
inline void write(uint16_t* to, const Floats& value, const Rounding& rounding, Word word) {
  store(to, upper_halves(rounding.round(value, word)));
}

template <typename P>
inline Floats read_exact(const P* parameter, const NoMaster* /*master*/) {
  return read(parameter);
}

inline Floats read_exact(const uint16_t* /*parameter*/, const float* master) {
  return read(master);
}

inline Floats read_exact(const uint16_t* parameter, const int16_t* remainder) {
  return (Floats)((Words)read(parameter) + (Words)((Integers)read(reinterpret_cast<const uint16_t*>(remainder)) >> 16));
}

template <typename P, typename Rounding>
inline void write_exact(P* parameter, NoMaster* /*master*/, const Floats& value, const Rounding& rounding) {
  write(parameter, value, rounding, kParameter);
}

template <typename Rounding>
inline void write_exact(uint16_t* parameter, float* master, const Floats& value, const Rounding& rounding) {
  store(master, value);
  write(parameter, value, rounding, kParameter);
}

// Adding half of the upper unit carries exactly if the lower half, as a signed number, is negative: so the sum of
// both parts is the value again. What is not a number must not be carried into one.
template <typename Rounding>
inline void write_exact(
    uint16_t* parameter, int16_t* remainder, const Floats& value, const Rounding& /*rounding*/) {
  const Words bits = (Words)value;
  const Words carried = value == value ? bits + 0x8000u : bits | 0x400000u;
  store(parameter, upper_halves(carried));
  store(remainder, upper_halves(bits << 16));
}

// The larger; not a number where either is not.
inline Floats maximum(const Floats& a, const Floats& b) {
  return a == a ? larger(a, b) : a;
}

// One vector of elements, the ones that start at i.
template <typename P, typename K, typename G, typename M, typename Rounding>
inline void update_vector(
    const Streams<P, K, G, M>& at, int64_t i, const Coefficients& c, bool zero_gradient, const Rounding& rounding) {
  const Floats p = read_exact(at.parameter + i, at.master + i);
  const Floats g = c.scale * read(at.gradient + i) + c.l2 * p;
  Floats m = read(at.first_moment + i);
  Floats v = read(at.second_moment + i);
  m = m + (g - m) * c.one_minus_beta1;
  v = v * c.beta2 + g * g * c.one_minus_beta2;
  write(at.first_moment + i, m, rounding, kFirstMoment);
  write(at.second_moment + i, v, rounding, kSecondMoment);
  if (at.max_second_moment != nullptr) {
    v = maximum(read(at.max_second_moment + i), v);
    write(at.max_second_moment + i, v, rounding, kMaxSecondMoment);
  }
  const Floats denominator = square_root(v) / c.root_bias2 + c.eps;
  write_exact(at.parameter + i, at.master + i, p * c.shrink - c.step_size * m / denominator, rounding);
  if (zero_gradient) {
    std::fill_n(at.gradient + i, kLanes, G{});
  }
}

// Whole vectors, from the streams' beginning on. By value: what is written could be a pointer, for all the compiler
// knows, and would have to be read again for every vector. Prefetching was no faster: memory is busy as it is.
template <typename P, typename K, typename G, typename M, typename Rounding>
__attribute__((noinline)) void update_vectors(
    const Streams<P, K, G, M> at, int64_t size, const Coefficients c, bool zero_gradient, Rounding& rounding) {
  for (int64_t i = 0; i < size; i += kLanes) {
    rounding.advance();
    update_vector(at, i, c, zero_gradient, rounding);
  }
}

// A vector's worth of memory for fewer elements, which are written back at the end.
template <typename T>
class Padded {
 public:
  Padded(T* elements, int64_t size) : elements_(elements), size_(elements == nullptr ? 0 : size) {
    std::copy_n(elements_, size_, numbers_);
  }
  ~Padded() { std::copy_n(numbers_, size_, elements_); }
  Padded(const Padded&) = delete;
  Padded& operator=(const Padded&) = delete;

  T* numbers() { return elements_ == nullptr ? nullptr : numbers_; }

 private:
  T* elements_;
  int64_t size_;
  T numbers_[kLanes] = {};
};

template <typename T>
inline T* advanced(T* pointer, int64_t by) {
  return pointer == nullptr ? nullptr : pointer + by;
}

template <typename P, typename K, typename G, typename M>
inline Streams<P, K, G, M> advanced(const Streams<P, K, G, M>& at, int64_t by) {
  return {
      advanced(at.parameter, by),    advanced(at.master, by),        advanced(at.gradient, by),
      advanced(at.first_moment, by), advanced(at.second_moment, by), advanced(at.max_second_moment, by)};
}

template <typename P, typename K, typename G, typename M, typename Rounding>
void update_piece(
    const Streams<P, K, G, M>& at, int64_t size, const Coefficients& c, bool zero_gradient, Rounding rounding) {
  const int64_t whole = size / kLanes * kLanes, rest = size - whole;
  update_vectors(at, whole, c, zero_gradient, rounding);
  if (rest > 0) {
    const Streams<P, K, G, M> tail = advanced(at, whole);
    Padded<P> parameter(tail.parameter, rest);
    Padded<K> master(tail.master, rest);
    Padded<G> gradient(tail.gradient, rest);
    Padded<M> first_moment(tail.first_moment, rest), second_moment(tail.second_moment, rest),
        max_second_moment(tail.max_second_moment, rest);
    const Streams<P, K, G, M> padded{
        parameter.numbers(),    master.numbers(),        gradient.numbers(),
        first_moment.numbers(), second_moment.numbers(), max_second_moment.numbers()};
    update_vectors(padded, kLanes, c, zero_gradient, rounding);
  }
}

template <typename P, typename K, typename G, typename M>
void update_pieces(const AdamW& args, int64_t begin, int64_t end) {
  constexpr bool kRounds = !std::is_same_v<K, int16_t> && (sizeof(P) == 2 || sizeof(M) == 2);
  const Streams<P, K, G, M> all{
      static_cast<P*>(args.parameter),     static_cast<K*>(args.master),
      static_cast<G*>(args.gradient),      static_cast<M*>(args.first_moment),
      static_cast<M*>(args.second_moment), static_cast<M*>(args.max_second_moment)};
  for (int64_t piece = begin; piece < end; ++piece) {
    const int64_t* const row = args.pieces + piece * kPieceColumns;
    const int64_t first = row[0], size = row[1] - row[0], segment = row[2];
    const Coefficients c(args.coefficients + segment * kCoefficientColumns, args.gradient_scale);
    const Streams<P, K, G, M> at = advanced(all, first);
    if (!c.active) {
      if (args.zero_gradient) {
        std::fill_n(at.gradient, size, G{});
      }
      continue;
    }
    if constexpr (kRounds) {
      if (args.draws != nullptr) {
        const Stochastic rounding(args.draws + segment * kDrawColumns, first);
        update_piece(at, size, c, args.zero_gradient, rounding);
        continue;
      }
    }
    update_piece(at, size, c, args.zero_gradient, Nearest{});
  }
}

template <typename P, typename K>
void update_with_master(const AdamW& args, int64_t begin, int64_t end) {
  if (args.wide_gradient) {
    args.wide_moments ? update_pieces<P, K, float, float>(args, begin, end)
                      : update_pieces<P, K, float, uint16_t>(args, begin, end);
  } else {
    args.wide_moments ? update_pieces<P, K, uint16_t, float>(args, begin, end)
                      : update_pieces<P, K, uint16_t, uint16_t>(args, begin, end);
  }
}

// Partial sums of a piece: which of them an element is added to does not depend on the width of the vectors. Enough
// of them to hide the latency of an addition.
constexpr int kSums = 16;
constexpr int kDoubles = kLanes / 2;
constexpr int kParts = kSums / kDoubles;
constexpr int64_t kAhead = 1024;  // elements, of what will be summed soon
typedef double Doubles __attribute__((vector_size(8 * kDoubles)));
typedef float HalfFloats __attribute__((vector_size(4 * kDoubles)));
typedef uint32_t HalfWords __attribute__((vector_size(4 * kDoubles)));

// In float64, the square of a float32 is exact: fused or not, the sum has the same bits.
inline Doubles add_square(const Doubles& sum, const HalfFloats& numbers) {
  const Doubles wide = __builtin_convertvector(numbers, Doubles);
#if defined(CPU_CAPABILITY_AVX512)
  return (Doubles)_mm512_fmadd_pd((__m512d)wide, (__m512d)wide, (__m512d)sum);
#elif defined(CPU_CAPABILITY_AVX2)
  return (Doubles)_mm256_fmadd_pd((__m256d)wide, (__m256d)wide, (__m256d)sum);
#else
  return sum + wide * wide;
#endif
}

struct Sums {
  Doubles part[kParts] = {};

  void add_squares(const float* from) {
    for (int i = 0; i < kParts; ++i) {
      part[i] = add_square(part[i], load<HalfFloats>(from + i * kDoubles));
    }
  }

  // The even elements first, then the odd ones: a pair of them is split without a shuffle.
  void add_squares(const uint16_t* from) {
    for (int i = 0; i < kParts / 2; ++i) {
      const HalfWords pairs = load<HalfWords>(from + i * 2 * kDoubles);
      Doubles &even = part[i], &odd = part[i + kParts / 2];
      even = add_square(even, (HalfFloats)(pairs << 16));
      odd = add_square(odd, (HalfFloats)(pairs & 0xffff0000u));
    }
  }

  double total() const {
    double sums[kSums];
    std::memcpy(sums, part, sizeof(sums));
    for (int width = kSums / 2; width > 0; width /= 2) {
      for (int i = 0; i < width; ++i) {
        sums[i] += sums[i + width];
      }
    }
    return sums[0];
  }
};

template <typename G>
void sum_squares(const G* gradient, const int64_t* pieces, int64_t begin, int64_t end, double* sums) {
  for (int64_t piece = begin; piece < end; ++piece) {
    const G* const numbers = gradient + pieces[piece * kPieceColumns];
    const int64_t size = pieces[piece * kPieceColumns + 1] - pieces[piece * kPieceColumns];
    const int64_t whole = size / kSums * kSums;
    Sums squares;
    for (int64_t i = 0; i < whole; i += kSums) {
      __builtin_prefetch(numbers + i + kAhead);  // may lie beyond the tensor: nothing is read
      squares.add_squares(numbers + i);
    }
    G rest[kSums] = {};
    std::copy(numbers + whole, numbers + size, rest);
    squares.add_squares(rest);
    sums[piece] = squares.total();
  }
}

}  // namespace

void adamw(const AdamW& args, int64_t begin, int64_t end) {
  if (args.wide_parameter) {
    update_with_master<float, NoMaster>(args, begin, end);
  } else if (args.master_kind == AdamWMaster::kNone) {
    update_with_master<uint16_t, NoMaster>(args, begin, end);
  } else if (args.master_kind == AdamWMaster::kFloat32) {
    update_with_master<uint16_t, float>(args, begin, end);
  } else {
    update_with_master<uint16_t, int16_t>(args, begin, end);
  }
}

void sum_of_squares(
    const void* gradient, bool wide_gradient, const int64_t* pieces, int64_t begin, int64_t end, double* sums) {
  if (wide_gradient) {
    sum_squares(static_cast<const float*>(gradient), pieces, begin, end, sums);
  } else {
    sum_squares(static_cast<const uint16_t*>(gradient), pieces, begin, end, sums);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace paracore
