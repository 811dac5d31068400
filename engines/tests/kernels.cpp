// Every instruction set against plain C++, to the last bit, and plain C++ against sums of our own in double.
// kernels sets: the sets of this machine. kernels SEED CASES: random shapes; prints the first difference and ends with 1.
// kernels product KIND ROWS INPUTS OUTPUTS GROUP: packed weights, scales, sums and inputs from stdin, as Python packs them;
// what every set makes of them, one after the other, to stdout.
#include "kernels/kernels.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#ifdef _WIN32
#include <fcntl.h>
#include <io.h>
#endif

namespace {

using namespace tformer::kernels;
using Floats = std::vector<float>;
using Size = std::size_t;

Size size(std::int64_t n) { return static_cast<Size>(n); }

/// Memory at a multiple of 64 bytes.
template <class T>
class Aligned {
 public:
  explicit Aligned(std::int64_t count, T fill = T()) : room_(size(count) + 64 / sizeof(T), fill) {
    const auto at = reinterpret_cast<std::uintptr_t>(room_.data());
    data_ = room_.data() + (64 - at % 64) % 64 / sizeof(T);
    count_ = size(count);
  }
  Aligned(const Aligned&) = delete;
  Aligned& operator=(const Aligned&) = delete;
  Aligned(Aligned&&) = default;
  T* data() { return data_; }
  const T* data() const { return data_; }
  T& operator[](std::int64_t i) { return data_[i]; }
  const T& operator[](std::int64_t i) const { return data_[i]; }
  std::vector<T> values() const { return {data_, data_ + count_}; }

 private:
  std::vector<T> room_;
  T* data_;
  Size count_;
};

/// A difference: what failed, and where.
struct Failure {
  std::string what;
};

void require(bool ok, const std::string& what) {
  if (!ok) throw Failure{what};
}

std::string of(double x) { return std::to_string(x); }

template <class T>
void require_same(const std::vector<T>& a, const std::vector<T>& b, const std::string& what) {
  require(a.size() == b.size(), what + ": sizes");
  for (Size i = 0; i < a.size(); ++i) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) != 0) {
      throw Failure{what + ": element " + std::to_string(i) + " is " + of(double(b[i])) + ", not " + of(double(a[i]))};
    }
  }
}

void require_near(double found, double expected, double error, const std::string& what) {
  require(std::fabs(found - expected) <= error, what + ": " + of(found) + ", not " + of(expected));
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::int64_t from(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine_);
  }
  float number(float deviation = 1) { return std::normal_distribution<float>(0, deviation)(engine_); }
  bool maybe() { return from(0, 1) == 1; }
  template <class T>
  T one_of(std::initializer_list<T> choices) {
    const std::vector<T> all(choices);  // GCC 12 for ARM64 takes the list itself for uninitialized
    return all[size(from(0, static_cast<std::int64_t>(all.size()) - 1))];
  }
  Aligned<float> numbers(std::int64_t count, float deviation = 1) {
    Aligned<float> made(count);
    for (std::int64_t i = 0; i < count; ++i) made[i] = number(deviation);
    return made;
  }
  template <class T>
  Aligned<T> integers(std::int64_t count, std::int64_t least, std::int64_t most) {
    Aligned<T> made(count);
    for (std::int64_t i = 0; i < count; ++i) made[i] = static_cast<T>(from(least, most));
    return made;
  }

 private:
  std::mt19937_64 engine_;
};

/// All sets of this machine; the reference is the first.
std::vector<const Kernels*> present() {
  std::vector<const Kernels*> found{named("portable")};
  for (const std::string& name : names()) {
    if (named(name) && name != "portable") found.push_back(named(name));
  }
  return found;
}

/// What a set computes, as vectors of numbers and bytes.
struct Result {
  std::vector<Floats> floats;
  std::vector<std::vector<std::uint8_t>> bytes;
  std::vector<std::vector<std::int32_t>> ints;
};

/// Runs with every set and requires the same bits; returns the reference.
Result everywhere(const std::string& what, const std::function<Result(const Kernels&)>& run) {
  Result reference;
  for (const Kernels* kernels : present()) {
    const Result found = run(*kernels);
    if (kernels->name == std::string("portable")) {
      reference = found;
      continue;
    }
    const std::string where = what + " with " + kernels->name;
    for (Size i = 0; i < found.floats.size(); ++i) require_same(reference.floats[i], found.floats[i], where);
    for (Size i = 0; i < found.bytes.size(); ++i) require_same(reference.bytes[i], found.bytes[i], where);
    for (Size i = 0; i < found.ints.size(); ++i) require_same(reference.ints[i], found.ints[i], where);
  }
  return reference;
}

double activation_of(Activation activation, double x) {
  switch (activation) {
    case Activation::relu: return std::max(0.0, x);
    case Activation::gelu: return 0.5 * x * (1 + std::erf(x / std::sqrt(2.0)));
    case Activation::gelu_tanh: return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::gelu_sigmoid: return x / (1 + std::exp(-1.702 * x));
    case Activation::silu: return x / (1 + std::exp(-x));
    default: return x;
  }
}

std::uint8_t rounded(const Rounding& how, float x, std::int64_t i) {
  const float inverse = 1.0F / how.step, scaled = x * (how.shrink ? how.shrink[i] * inverse : inverse);
  return static_cast<std::uint8_t>(std::clamp(std::nearbyint(double(scaled)) + how.zero, 0.0, 255.0));
}

/// Everything that can follow a product, over rows and width; the numbers y are given.
struct Following {
  Finish finish;
  Aligned<float> gate, residual, shrink;
  std::int64_t rows, width, ld;

  Following(Random& random, std::int64_t n, std::int64_t columns)
      : gate(random.numbers(n * (columns + 5))), residual(random.numbers(n * (columns + 5))),
        shrink(random.numbers(columns)), rows(n), width(columns), ld(columns + random.from(0, 5)) {
    using A = Activation;
    for (std::int64_t i = 0; i < columns; ++i) shrink[i] = 0.1F + std::fabs(shrink[i]);
    finish.activation = random.one_of({A::none, A::relu, A::gelu, A::gelu_tanh, A::gelu_sigmoid, A::silu});
    if (random.maybe()) finish.gate = gate.data();
    if (random.maybe()) finish.residual = residual.data();
    finish.gate_ld = finish.residual_ld = columns + 5;
    finish.to.ld = finish.to.bytes_ld = ld;
    finish.to.rounding.step = 0.02F;
    finish.to.rounding.zero = static_cast<std::int32_t>(random.from(0, 255));
    if (random.maybe()) finish.to.rounding.shrink = shrink.data();
  }
  /// Runs work that stores into rows of its own.
  Result run(const std::function<void(const Finish&)>& work) const {
    Aligned<float> floats(rows * ld, 7.0F);
    Aligned<std::uint8_t> bytes(rows * ld, 7);
    Finish own = finish;
    own.to.floats = floats.data();
    own.to.bytes = bytes.data();
    work(own);
    return {{floats.values()}, {bytes.values()}, {}};
  }
  /// y (rows, width) in double, and how far each may be off.
  void check(const Result& found, const std::vector<double>& y, double error, const std::string& what) const {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < ld; ++i) {
        const float number = found.floats[0][size(r * ld + i)];
        const std::uint8_t byte = found.bytes[0][size(r * ld + i)];
        if (i >= width) {
          require(number == 7.0F && byte == 7, what + ": writes behind the width");
          continue;
        }
        const double gain = finish.gate ? double(finish.gate[r * finish.gate_ld + i]) : 1.0;
        const double activated = activation_of(finish.activation, y[size(r * width + i)]) * gain;
        const double expected = activated + (finish.residual ? double(finish.residual[r * finish.residual_ld + i]) : 0.0);
        require_near(double(number), expected, error * (2 + std::fabs(gain)) + 4e-6 * std::fabs(expected), what);
        require(byte == rounded(finish.to.rounding, number, i), what + ": rounding");
      }
    }
  }
};

void check_elementwise(Random& random) {
  const std::int64_t rows = random.from(1, 4), width = random.from(1, 200), ld = width + 3;
  const Following following(random, rows, width);
  const Aligned<float> x = random.numbers(rows * ld, 3);
  const Result found = everywhere("elementwise", [&](const Kernels& kernels) {
    return following.run([&](const Finish& finish) { kernels.elementwise({x.data(), ld, width, finish}, 0, rows); });
  });
  std::vector<double> y;
  for (std::int64_t i = 0; i < rows * width; ++i) y.push_back(double(x[i / width * ld + i % width]));
  following.check(found, y, 1e-6, "elementwise");
}

/// In how many panels at once, and rows, a product is asked for.
void in_pieces(const Kernels& kernels, const Product& product, std::int64_t rows, std::int64_t each_row,
               std::int64_t each_panel) {
  const std::int64_t panels = panels_of(product.matrix);
  for (std::int64_t r = 0; r < rows; r += each_row) {
    for (std::int64_t p = 0; p < panels; p += each_panel) {
      kernels.product(product, {r, std::min(each_row, rows - r), p, std::min(each_panel, panels - p)});
    }
  }
}

void check_product_floats(Random& random, Numbers numbers) {
  const bool half = numbers == Numbers::bf16;
  const std::int64_t rows = random.from(1, 20), inputs = random.from(1, 90), outputs = random.from(1, 200);
  const std::int64_t step = half ? 2 : 1, steps = padded(inputs, step) / step, ld = inputs + 2, panels = padded(outputs) / 16;
  Aligned<float> weights(panels * steps * 16);
  Aligned<std::uint16_t> halves(panels * steps * 32);
  const auto weight = [&](std::int64_t n, std::int64_t k) {
    const std::int64_t panel = n / 16 * steps;
    return half ? widened({halves[((panel + k / 2) * 16 + n % 16) * 2 + k % 2]}) : weights[(panel + k) * 16 + n % 16];
  };
  for (std::int64_t n = 0; n < outputs; ++n) {
    for (std::int64_t k = 0; k < inputs; ++k) {
      const float x = random.number();
      std::uint32_t bits;
      std::memcpy(&bits, &x, 4);
      halves[((n / 16 * steps + k / 2) * 16 + n % 16) * 2 + k % 2] = static_cast<std::uint16_t>(bits >> 16U);
      if (!half) weights[(n / 16 * steps + k) * 16 + n % 16] = x;
    }
  }
  const Aligned<float> x = random.numbers(rows * ld), bias = random.numbers(padded(outputs));
  const Following following(random, rows, outputs);
  Product product;
  product.matrix.numbers = numbers;
  product.matrix.inputs = inputs;
  product.matrix.outputs = outputs;
  product.matrix.weights = half ? static_cast<const void*>(halves.data()) : weights.data();
  if (random.maybe()) product.matrix.bias = bias.data();
  product.x.floats = x.data();
  product.x.ld = ld;
  const std::int64_t each_row = random.from(1, rows), each_panel = random.from(1, panels);
  const std::string what = half ? "bf16 product" : "fp32 product";
  const Result found = everywhere(what, [&](const Kernels& kernels) {
    return following.run([&](const Finish& finish) {
      product.finish = finish;
      const bool apart = kernels.name != std::string("portable");  // pieces must not matter
      in_pieces(kernels, product, rows, apart ? each_row : rows, apart ? each_panel : panels);
    });
  });
  std::vector<double> y;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t n = 0; n < outputs; ++n) {
      double sum = product.matrix.bias ? double(bias[n]) : 0;
      for (std::int64_t k = 0; k < inputs; ++k) sum += double(x[r * ld + k]) * double(weight(n, k));
      y.push_back(sum);
    }
  }
  following.check(found, y, 1e-5, what);
}

void check_product_int8(Random& random) {
  const std::int64_t rows = random.one_of<std::int64_t>({1, 2, 5, 16, 33, random.from(1, 70)});
  const std::int64_t inputs = random.from(1, 300), outputs = random.from(1, 150);
  const std::int64_t whole = padded(inputs, 64), ld = whole + 64 * random.from(0, 1), panels = padded(outputs) / 16;
  Aligned<std::int8_t> weights(panels * whole * 16);
  Aligned<std::int32_t> sums(panels * 16);
  const bool extreme = random.from(0, 3) == 0;  // products that would overflow 16 bits
  for (std::int64_t n = 0; n < outputs; ++n) {
    for (std::int64_t k = 0; k < inputs; ++k) {
      const std::int64_t integer = extreme ? random.one_of<std::int64_t>({-128, 127}) : random.from(-127, 127);
      weights[(n / 16 * (whole / 4) + k / 4) * 64 + n % 16 * 4 + k % 4] = static_cast<std::int8_t>(integer);
      sums[n] += static_cast<std::int32_t>(integer);
    }
  }
  const auto x = random.integers<std::uint8_t>((rows + 16) * ld, extreme ? 255 : 0, 255);
  Aligned<float> scales = random.numbers(padded(outputs), 0.01F), bias = random.numbers(padded(outputs));
  const Following following(random, rows, outputs);
  Product product;
  product.matrix.numbers = Numbers::int8;
  product.matrix.inputs = inputs;
  product.matrix.outputs = outputs;
  product.matrix.weights = weights.data();
  product.matrix.scales = scales.data();
  product.matrix.sums = sums.data();
  if (random.maybe()) product.matrix.bias = bias.data();
  product.x.integers = x.data();
  product.x.ld = ld;
  product.x.step = 0.01F;
  product.x.zero = static_cast<std::int32_t>(random.from(0, 255));
  const std::int64_t each_row = random.from(1, rows), each_panel = random.from(1, panels);
  const Result found = everywhere("int8 product", [&](const Kernels& kernels) {
    return following.run([&](const Finish& finish) {
      product.finish = finish;
      const bool apart = random.maybe();
      in_pieces(kernels, product, rows, apart ? each_row : rows, apart ? each_panel : panels);
    });
  });
  std::vector<double> y;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t n = 0; n < outputs; ++n) {
      std::int32_t sum = 0;
      for (std::int64_t k = 0; k < inputs; ++k) {
        sum += (x[r * ld + k] - product.x.zero) * weights[(n / 16 * (whole / 4) + k / 4) * 64 + n % 16 * 4 + k % 4];
      }
      const float scale = scales[n] * product.x.step;
      y.push_back(double(std::fma(static_cast<float>(sum), scale, product.matrix.bias ? bias[n] : 0.0F)));
    }
  }
  following.check(found, y, 1e-6, "int8 product");
}

void check_product_int4(Random& random) {
  const std::int64_t group = random.one_of<std::int64_t>({16, 32, 64, 128, 256});
  const std::int64_t rows = random.from(1, 12), inputs = random.from(1, 400), outputs = random.from(1, 100);
  const std::int64_t whole = padded(inputs, group), groups = whole / group, ld = inputs + 1, panels = padded(outputs) / 16;
  Aligned<std::uint8_t> weights(panels * whole * 8);
  const auto at = [&](std::int64_t n, std::int64_t k) -> std::uint8_t& {
    return weights[(n / 16 * (whole / 8) + k / 8) * 64 + n % 16 * 4 + k % 4];
  };
  for (std::int64_t n = 0; n < outputs; ++n) {
    for (std::int64_t k = 0; k < whole; ++k) {
      at(n, k) = static_cast<std::uint8_t>(at(n, k) | random.from(0, 15) << (k % 8 >= 4 ? 4 : 0));
    }
  }
  Aligned<float> scales = random.numbers(panels * groups * 16, 0.1F), bias = random.numbers(padded(outputs));
  Aligned<float> x = random.numbers(rows * ld);
  if (random.maybe()) std::fill_n(x.data(), std::min(inputs, group), 0.0F);  // a group of zeros
  const Following following(random, rows, outputs);
  Product product;
  product.matrix.numbers = Numbers::int4;
  product.matrix.inputs = inputs;
  product.matrix.outputs = outputs;
  product.matrix.group = group;
  product.matrix.weights = weights.data();
  product.matrix.scales = scales.data();
  if (random.maybe()) product.matrix.bias = bias.data();
  Aligned<std::int8_t> integers(rows * whole);
  Aligned<float> row_scales(rows * groups);
  Aligned<std::int32_t> sums(rows * groups);
  product.x.integers = integers.data();
  product.x.ld = whole;
  product.x.scales = row_scales.data();
  product.x.sums = sums.data();
  const Result found = everywhere("int4 product", [&](const Kernels& kernels) {
    Groups work{x.data(), ld, inputs, group, integers.data(), row_scales.data(), sums.data()};
    kernels.round_groups(work, 0, rows);
    Result result = following.run([&](const Finish& finish) {
      product.finish = finish;
      in_pieces(kernels, product, rows, random.from(1, rows), random.from(1, panels));
    });
    result.floats.push_back(row_scales.values());
    result.ints.push_back(sums.values());
    const std::vector<std::int8_t> bytes = integers.values();
    result.bytes.emplace_back(bytes.begin(), bytes.end());
    return result;
  });
  std::vector<double> y;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t k = 0; k < whole; ++k) {
      const double scale = double(row_scales[r * groups + k / group]), expected = k < inputs ? double(x[r * ld + k]) : 0;
      require_near(scale * integers[r * whole + k], expected, scale * 0.5001, "int4 inputs");
    }
    for (std::int64_t n = 0; n < outputs; ++n) {
      double sum = product.matrix.bias ? double(bias[n]) : 0;
      for (std::int64_t k = 0; k < whole; ++k) {
        const int integer = (at(n, k) >> (k % 8 >= 4 ? 4 : 0) & 15) - 8;
        sum += double(row_scales[r * groups + k / group]) * integers[r * whole + k] * integer *
               double(scales[(n / 16 * groups + k / group) * 16 + n % 16]);
      }
      y.push_back(sum);
    }
  }
  following.check(found, y, 1e-4, "int4 product");
  x[random.from(0, rows - 1) * ld + random.from(0, inputs - 1)] = std::numeric_limits<float>::quiet_NaN();
  everywhere("int4 groups with a NaN", [&](const Kernels& kernels) {
    kernels.round_groups({x.data(), ld, inputs, group, integers.data(), row_scales.data(), sums.data()}, 0, rows);
    const std::vector<std::int8_t> bytes = integers.values();
    return Result{{row_scales.values()}, {{bytes.begin(), bytes.end()}}, {sums.values()}};
  });
}

void check_norm(Random& random) {
  const std::int64_t rows = random.from(1, 9), width = random.from(2, 300), ld = width + 1;
  const Aligned<float> x = random.numbers(rows * ld, 2), gain = random.numbers(width);
  const Aligned<float> bias = random.numbers(width);
  const Following following(random, rows, width);
  Normed work;
  work.norm = random.one_of({Norm::layer, Norm::rms, Norm::annotated});
  work.eps = 1e-5F;
  work.gain = gain.data();
  if (random.maybe()) work.bias = bias.data();
  work.x = x.data();
  work.ld = ld;
  work.width = width;
  const Result found = everywhere("norm", [&](const Kernels& kernels) {
    return following.run([&](const Finish& finish) {
      Normed own = work;
      own.to = finish.to;
      kernels.norm(own, 0, rows);
    });
  });
  for (std::int64_t r = 0; r < rows; ++r) {
    std::vector<double> row;
    double mean = 0, squares = 0;
    for (std::int64_t i = 0; i < width; ++i) row.push_back(double(x[r * ld + i]));
    for (const double each : row) mean += work.norm == Norm::rms ? 0 : each / double(width);
    for (const double each : row) squares += (each - mean) * (each - mean);
    const double deviation = work.norm == Norm::annotated ? std::sqrt(squares / double(width - 1)) + double(work.eps)
                                                          : std::sqrt(squares / double(width) + double(work.eps));
    for (std::int64_t i = 0; i < width; ++i) {
      const double y = (row[size(i)] - mean) / deviation * double(gain[i]) + (work.bias ? double(bias[i]) : 0.0);
      const float number = found.floats[0][size(r * following.ld + i)];
      // Two numbers that hardly differ have few digits left of their difference.
      require_near(double(number), y, 2e-5 * std::max(1.0, 1 / deviation), "norm");
      require(found.bytes[0][size(r * following.ld + i)] == rounded(following.finish.to.rounding, number, i),
              "norm: rounding");
    }
  }
}

void check_embed(Random& random) {
  const std::int64_t rows = random.from(1, 6), width = random.from(1, 90), vocabulary = 11, ld = width + 2;
  const Aligned<float> table = random.numbers(vocabulary * width), positions = random.numbers(7 * width);
  const auto integers = random.integers<std::int8_t>(vocabulary * width, -127, 127);
  const Aligned<float> scales = random.numbers(vocabulary);
  const auto ids = random.integers<std::int32_t>(rows, 0, vocabulary - 1), places = random.integers<std::int32_t>(rows, 0, 6);
  const bool bytes = random.maybe();
  Embedding work;
  work.ids = ids.data();
  work.width = width;
  work.floats = bytes ? nullptr : table.data();
  work.integers = bytes ? integers.data() : nullptr;
  work.scales = scales.data();
  work.scale = 3.5F;
  work.places = places.data();
  if (random.maybe()) work.positions = positions.data();
  work.ld = ld;
  const Result found = everywhere("embed", [&](const Kernels& kernels) {
    Aligned<float> out(rows * ld, 7.0F);
    Embedding own = work;
    own.out = out.data();
    kernels.embed(own, 0, rows);
    return Result{{out.values()}, {}, {}};
  });
  for (std::int64_t i = 0; i < rows * width; ++i) {
    const std::int64_t r = i / width, j = ids[r] * width + i % width;
    const float x = bytes ? static_cast<float>(integers[j]) * scales[ids[r]] : table[j] * 3.5F;
    const float y = work.positions ? x + positions[places[r] * width + i % width] : x;
    require(found.floats[0][size(r * ld + i % width)] == y, "embed");
  }
}

void check_recur(Random& random) {
  const std::int64_t width = random.from(1, 90);
  const Aligned<float> forget = random.numbers(width, 9), x = random.numbers(width), past = random.numbers(width);
  Recurrence work;
  work.forget = forget.data();
  work.x = x.data();
  if (random.maybe()) work.past = past.data();
  work.width = width;
  const Result found = everywhere("recur", [&](const Kernels& kernels) {
    Aligned<float> state(width + 1, 7.0F), out(width + 1, 7.0F);
    Recurrence own = work;
    own.state = state.data();
    own.out = out.data();
    kernels.recur(own);
    return Result{{state.values(), out.values()}, {}, {}};
  });
  for (std::int64_t i = 0; i < width; ++i) {
    const double kept = 1 / (1 + std::exp(-double(forget[i])));
    const double state = (work.past ? kept * double(past[i]) : 0) + (1 - kept) * double(x[i]);
    require_near(double(found.floats[0][size(i)]), state, 1e-6, "recur");
    require(found.floats[1][size(i)] == std::max(0.0F, found.floats[0][size(i)]), "recur: relu");
  }
  require(found.floats[0][size(width)] == 7.0F && found.floats[1][size(width)] == 7.0F, "recur: past the end");
}

/// The bf16 that is nearest, of two as near the even one, found by comparing distances.
Bf16 nearest(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const Bf16 below{static_cast<std::uint16_t>(bits >> 16U)}, above{static_cast<std::uint16_t>((bits >> 16U) + 1)};
  if (std::isinf(x)) return below;
  const double past_all = std::copysign(std::ldexp(1.0, 128), double(x)), top = double(widened(above));
  const double to_below = std::fabs(double(x) - double(widened(below)));
  const double to_above = std::fabs((std::isinf(top) ? past_all : top) - double(x));
  return to_below < to_above || (to_below == to_above && below.bits % 2 == 0) ? below : above;
}

/// A number as a cache keeps it.
float kept(Numbers cached, float x) { return cached == Numbers::bf16 ? widened(nearest(x)) : x; }

/// Keys or values of either type.
class Cache {
 public:
  Cache(Numbers cached, const Floats& numbers)
      : cached_(cached), floats_(std::int64_t(numbers.size())), halves_(std::int64_t(numbers.size())) {
    for (Size i = 0; i < numbers.size(); ++i) {
      floats_[std::int64_t(i)] = numbers[i];
      halves_[std::int64_t(i)] = nearest(numbers[i]);
    }
  }
  void* data() { return cached_ == Numbers::bf16 ? static_cast<void*>(halves_.data()) : floats_.data(); }
  Floats values() const {
    Floats found = floats_.values();
    for (Size i = 0; cached_ == Numbers::bf16 && i < found.size(); ++i) found[i] = widened(halves_[std::int64_t(i)]);
    return found;
  }

 private:
  Numbers cached_;
  Aligned<float> floats_;
  Aligned<Bf16> halves_;
};

std::string with(const char* what, Numbers cached) {
  return std::string(what) + (cached == Numbers::bf16 ? " over bf16" : "");
}

/// Every kind of number that a cache may get, as keys and as values.
void check_rounding_to_bf16(Random& random) {
  const std::int64_t width = random.from(1, 40), length = random.from(1, 40), count = length * width;
  Aligned<float> x(count);
  for (std::int64_t i = 0; i < count; ++i) {
    const bool tie = random.maybe();
    const auto bits = static_cast<std::uint32_t>(random.from(0, 0xFFFF) << 16U | (tie ? 0x8000 : random.from(0, 0xFFFF)));
    std::memcpy(&x[i], &bits, 4);
  }
  const float largest = std::numeric_limits<float>::max(), nan = std::numeric_limits<float>::signaling_NaN();
  for (const float special : {0.0F, -0.0F, largest, -largest, INFINITY, -INFINITY, nan, -nan}) {
    x[random.from(0, count - 1)] = special;
  }
  const std::int64_t room = source_size(length, width);
  const Result found = everywhere("rounding to bf16", [&](const Kernels& kernels) {
    Cache keys(Numbers::bf16, Floats(size(room))), values(Numbers::bf16, Floats(size(room)));
    kernels.pack_source({1, width, length, x.data(), x.data(), width, width, Numbers::bf16, keys.data(), values.data(), room},
                        0, 1);
    return Result{{keys.values(), values.values()}, {}, {}};
  });
  for (std::int64_t t = 0; t < length; ++t) {
    for (std::int64_t d = 0; d < width; ++d) {
      const float number = x[t * width + d];
      const float key = found.floats[0][size(t / 16 * 16 * width + d * key_lanes(length, t) + t % 16)];
      const float value = found.floats[1][size(t * padded(width) + d)];
      require_same<float>({key}, {value}, "rounding to bf16");
      if (std::isnan(number)) {
        require(std::isnan(value), "rounding NaN to bf16");
      } else {
        require_same<float>({widened(nearest(number))}, {value}, "rounding to bf16");
      }
    }
  }
}

/// Softmax of scores times values, in double.
std::vector<double> attended(const std::vector<double>& scores, const std::function<double(Size, std::int64_t)>& value,
                             std::int64_t head_size) {
  const double most = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  for (const double score : scores) sum += std::exp(score - most);
  std::vector<double> y(size(head_size));
  for (Size t = 0; t < scores.size(); ++t) {
    for (std::int64_t d = 0; d < head_size; ++d) y[size(d)] += std::exp(scores[t] - most) / sum * value(t, d);
  }
  return y;
}

std::int64_t head_size_of(Random& random) {
  return random.one_of<std::int64_t>({8, 16, 20, 32, 33, 64, 80, 128, random.from(1, 128)});
}

void check_self_attention(Random& random, Numbers cached) {
  const std::int64_t heads = random.from(1, 3), head_size = head_size_of(random), room = padded(head_size);
  const std::int64_t rows = random.from(1, 5), slots = rows + 2, most = random.from(1, 70), width = heads * head_size;
  const std::int64_t head_stride = most * room, slot_stride = heads * head_stride, ld = 3 * width + 1;
  const Aligned<float> qkv = random.numbers(rows * ld);
  Floats before_keys = random.numbers(slots * slot_stride).values(), before_values = before_keys;
  for (Size i = 0; i < before_keys.size(); ++i) {
    before_values[i] = random.number();
    if (std::int64_t(i) % room >= head_size) before_keys[i] = before_values[i] = 0;
  }
  Aligned<std::int32_t> positions = random.integers<std::int32_t>(rows, 0, most - 1);
  const auto written_by = random.integers<std::int32_t>(rows * most, rows, slots - 1);  // slots that no row writes
  const Aligned<float> bias = random.numbers(heads * 200);
  const Following following(random, rows, width);
  SelfAttention work;
  work.heads = heads;
  work.size = head_size;
  work.scale = 0.3F;
  work.q = qkv.data();
  work.k = qkv.data() + width;
  work.v = qkv.data() + 2 * width;
  work.ld = ld;
  work.slot_stride = slot_stride;
  work.head_stride = head_stride;
  work.positions = positions.data();
  if (random.maybe()) work.written_by = written_by.data();
  work.written_ld = most;
  if (random.maybe()) work.bias = bias.data() + 100;
  work.bias_stride = 200;
  work.cached = cached;
  const std::string what = with("self-attention", cached);
  const Result found = everywhere(what, [&](const Kernels& kernels) {
    Cache keys(cached, before_keys), values(cached, before_values);
    Aligned<float> scratch(attention_scratch(most));
    Result result = following.run([&](const Finish& finish) {
      SelfAttention mine = work;
      mine.keys = keys.data();
      mine.values = values.data();
      mine.to = finish.to;
      const std::int64_t half = random.from(0, heads - 1);
      kernels.attend_self(mine, {0, rows, 0, half}, scratch.data());
      kernels.attend_self(mine, {0, rows, half, heads - half}, scratch.data());
    });
    result.floats.push_back(keys.values());
    result.floats.push_back(values.values());
    return result;
  });
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto element = [&](const Floats& cache, std::int64_t t, std::int64_t d) {
        const bool other = work.written_by && t < positions[r];
        const std::int64_t slot = other ? written_by[r * most + t] : r;
        return double(cache[size(slot * slot_stride + h * head_stride + t * room + d)]);
      };
      std::vector<double> scores;
      for (std::int64_t t = 0; t <= positions[r]; ++t) {
        double sum = 0;
        for (std::int64_t d = 0; d < head_size; ++d) {
          sum += double(qkv[r * ld + h * head_size + d]) * element(found.floats[1], t, d);
        }
        scores.push_back(sum * 0.3F + (work.bias ? double(work.bias[h * 200 + t - positions[r]]) : 0));
      }
      const std::vector<double> y = attended(
          scores, [&](Size t, std::int64_t d) { return element(found.floats[2], std::int64_t(t), d); }, head_size);
      for (std::int64_t d = 0; d < head_size; ++d) {
        const float number = found.floats[0][size(r * following.ld + h * head_size + d)];
        require_near(double(number), y[size(d)], 2e-5, what);
      }
      for (std::int64_t d = 0; d < room; ++d) {
        const float k = d < head_size ? kept(cached, qkv[r * ld + width + h * head_size + d]) : 0;
        const Size at = size(r * slot_stride + h * head_stride + positions[r] * room + d);
        require(found.floats[1][at] == k, what + ": the new key");
      }
    }
  }
}

void check_shared_attention(Random& random, Numbers cached) {
  const std::int64_t heads = random.from(1, 3), head_size = head_size_of(random), width = heads * head_size;
  const std::int64_t queries = random.from(1, 11), length = random.from(1, 75), ld = width + 3;
  const Aligned<float> q = random.numbers(queries * ld), k = random.numbers(length * ld), v = random.numbers(length * ld);
  const Aligned<float> bias = random.numbers(heads * 200);
  const Following following(random, queries, width);
  SharedAttention work;
  work.heads = heads;
  work.size = head_size;
  work.length = length;
  work.scale = 0.3F;
  work.chains = random.maybe() ? 1 : 4;
  work.q = q.data();
  work.ld = ld;
  work.cached = cached;
  work.head_stride = source_size(length, head_size);
  if (random.maybe()) work.bias = bias.data() + 100;
  work.bias_stride = 200;
  work.weights_ld = padded(length);
  const std::string what = with("shared attention", cached);
  const Result found = everywhere(what, [&](const Kernels& kernels) {
    Cache keys(cached, Floats(size(heads * work.head_stride))), values(cached, Floats(size(heads * work.head_stride)));
    Aligned<float> weights(queries * heads * work.weights_ld), scratch(attention_scratch(length));
    kernels.pack_source({heads, head_size, length, k.data(), v.data(), ld, ld, cached, keys.data(), values.data(),
                         work.head_stride}, 0, heads);
    Result result = following.run([&](const Finish& finish) {
      SharedAttention mine = work;
      mine.keys = keys.data();
      mine.values = values.data();
      mine.weights = weights.data();
      mine.to = finish.to;
      const std::int64_t some = random.from(0, queries);  // neighbours must not matter
      kernels.attend_shared(mine, {0, some, 0, heads}, scratch.data());
      kernels.attend_shared(mine, {some, queries - some, 0, heads}, scratch.data());
    });
    result.floats.push_back(weights.values());
    result.floats.push_back(keys.values());
    result.floats.push_back(values.values());
    return result;
  });
  for (std::int64_t i = 0; i < queries; ++i) {
    for (std::int64_t h = 0; h < heads; ++h) {
      std::vector<double> scores;
      for (std::int64_t t = 0; t < length; ++t) {
        double sum = 0;
        for (std::int64_t d = 0; d < head_size; ++d) {
          sum += double(q[i * ld + h * head_size + d]) * double(kept(cached, k[t * ld + h * head_size + d]));
        }
        scores.push_back(sum * 0.3F + (work.bias ? double(work.bias[h * 200 + t - i]) : 0));
      }
      const auto value = [&](Size t, std::int64_t d) {
        return double(kept(cached, v[std::int64_t(t) * ld + h * head_size + d]));
      };
      const std::vector<double> y = attended(scores, value, head_size);
      for (std::int64_t d = 0; d < head_size; ++d) {
        require_near(double(found.floats[0][size(i * following.ld + h * head_size + d)]), y[size(d)], 2e-5, what);
      }
      double sum = 0;
      for (std::int64_t t = 0; t < length; ++t) {
        sum += double(found.floats[1][size((i * heads + h) * work.weights_ld + t)]);
      }
      require_near(sum, 1, 1e-5, what + ": weights");
    }
  }
}

void check_output(Random& random) {
  const std::int64_t rows = random.from(1, 40), inputs = random.from(1, 70), outputs = random.from(1, 1200);
  const std::int64_t best = random.from(1, std::min<std::int64_t>(12, outputs)), whole = padded(inputs, 64);
  const std::int64_t blocks = (outputs + 255) / 256;
  const auto x = random.integers<std::uint8_t>((rows + 16) * whole, 0, 3);  // few values: many equal scores
  const auto weights = random.integers<std::int8_t>(padded(outputs) * whole, -2, 2);
  Aligned<float> scales(padded(outputs), 1.0F);
  Aligned<std::int32_t> sums(padded(outputs));
  for (std::int64_t n = 0; n < outputs; ++n) {
    for (std::int64_t k = 0; k < whole; ++k) sums[n] += weights[(n / 16 * (whole / 4) + k / 4) * 64 + n % 16 * 4 + k % 4];
  }
  Output work;
  work.matrix.numbers = Numbers::int8;
  work.matrix.inputs = whole;
  work.matrix.outputs = outputs;
  work.matrix.weights = weights.data();
  work.matrix.scales = scales.data();
  work.matrix.sums = sums.data();
  work.x.integers = x.data();
  work.x.ld = whole;
  work.x.step = 0.5F;
  work.best = best;
  work.rows = rows;
  work.logits_ld = outputs + 3;
  const std::int64_t threads = random.from(1, 3);
  const Result found = everywhere("output", [&](const Kernels& kernels) {
    Result result;
    for (const int how : {0, 1, 2}) {  // without all logits, with them, with those of a product
      Aligned<float> logits(rows * work.logits_ld), largest(rows * blocks), totals(rows * blocks), scores(rows * best);
      Aligned<float> best_logits(threads * rows * best);
      Aligned<std::int32_t> best_ids(threads * rows * best), ids(rows * best);
      Output own = work;
      own.logits = how ? logits.data() : nullptr;
      if (how == 2) {
        Product product;
        product.matrix = work.matrix;
        product.x = work.x;
        product.finish.to.floats = logits.data();
        product.finish.to.ld = own.given_ld = work.logits_ld;
        kernels.product(product, {0, rows, 0, padded(outputs) / lanes});
        own.given = logits.data();
        own.matrix.weights = nullptr;
      }
      own.largest = largest.data();
      own.sums = totals.data();
      own.best_logits = best_logits.data();
      own.best_ids = best_ids.data();
      kernels.start_output(own, threads);
      for (std::int64_t block = blocks; block-- > 0;) {  // whatever the order, whoever does it
        const std::int64_t some = random.from(0, rows);
        kernels.output(own, {0, some, block, 1, random.from(0, threads - 1)});
        kernels.output(own, {some, rows - some, block, 1, random.from(0, threads - 1)});
      }
      kernels.finish_output(own, {0, rows, threads, ids.data(), scores.data()});
      result.ints.push_back(ids.values());
      result.floats.push_back(scores.values());
      result.floats.push_back(logits.values());
    }
    return result;
  });
  require_same(found.ints[0], found.ints[1], "output: all logits or none");
  require_same(found.floats[0], found.floats[2], "output: all logits or none");
  require_same(found.ints[0], found.ints[2], "output: given logits");
  require_same(found.floats[0], found.floats[4], "output: given logits");
  require_same(found.floats[3], found.floats[5], "output: given logits");
  for (std::int64_t r = 0; r < rows; ++r) {
    std::vector<double> logits;
    for (std::int64_t n = 0; n < outputs; ++n) {
      std::int32_t sum = 0;
      for (std::int64_t k = 0; k < whole; ++k) {
        sum += x[r * whole + k] * weights[(n / 16 * (whole / 4) + k / 4) * 64 + n % 16 * 4 + k % 4];
      }
      logits.push_back(0.5 * sum);
    }
    const double most = *std::max_element(logits.begin(), logits.end());
    double total = 0;
    for (const double logit : logits) total += std::exp(logit - most);
    std::vector<std::int32_t> order(logits.size());
    for (Size i = 0; i < order.size(); ++i) order[i] = static_cast<std::int32_t>(i);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return logits[size(a)] > logits[size(b)]; });
    for (std::int64_t i = 0; i < best; ++i) {
      require(found.ints[0][size(r * best + i)] == order[size(i)], "output: the best tokens");
      require_near(double(found.floats[0][size(r * best + i)]), logits[size(order[size(i)])] - most - std::log(total), 2e-5,
                   "output: log-probabilities");
    }
    for (std::int64_t n = 0; n < outputs; ++n) {
      require_near(double(found.floats[3][size(r * work.logits_ld + n)]), logits[size(n)] - most - std::log(total), 2e-5,
                   "output: all log-probabilities");
    }
  }
}

/// Units in the last place that a number is off; denormal numbers count as 0.
double units(float found, double expected) {
  const float nearest = static_cast<float>(expected);
  const float magnitude = std::fabs(nearest);
  const double step = double(std::nextafter(magnitude, std::numeric_limits<float>::infinity())) - double(magnitude);
  return std::fabs(double(found) - expected) / step;
}

void check_mathematics(Random& random) {
  constexpr std::int64_t count = 1000;
  Aligned<float> x(count), positive(count);
  for (std::int64_t i = 0; i < count; ++i) {
    x[i] = random.maybe() ? random.number(3) : static_cast<float>(random.from(-87000, 88000)) / 1000;
    positive[i] = std::exp(static_cast<float>(random.from(-80000, 80000)) / 1000) * (random.maybe() ? 1.0F : 0.0F) + 1e-30F;
    if (random.maybe()) positive[i] = 1 + std::fabs(random.number(0.3F));
  }
  x[0] = -std::numeric_limits<float>::infinity();
  x[1] = -200;
  x[2] = 0;
  const Result found = everywhere("exp, log, erf", [&](const Kernels& kernels) {
    Aligned<float> a(count), b(count), c(count);
    kernels.exp(x.data(), a.data(), count);
    kernels.log(positive.data(), b.data(), count);
    kernels.erf(x.data(), c.data(), count);
    return Result{{a.values(), b.values(), c.values()}, {}, {}};
  });
  require(found.floats[0][0] == 0 && found.floats[0][1] == 0 && found.floats[0][2] == 1, "exp at -inf, -200, 0");
  for (Size i = 2; i < size(count); ++i) {
    const double at = double(x[std::int64_t(i)]), log = std::log(double(positive[std::int64_t(i)]));
    require(units(found.floats[0][i], std::exp(at)) <= 2, "exp(" + of(at) + ") is " + of(double(found.floats[0][i])));
    require_near(double(found.floats[1][i]), log, 1e-7 + 2e-7 * std::fabs(log), "log");
    require_near(double(found.floats[2][i]), std::erf(at), 2e-7, "erf(" + of(at) + ")");
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const Kernels* kernels : present()) {
    float y = 0;
    kernels->exp(&nan, &y, 1);
    require(std::isnan(y), std::string("exp of NaN with ") + kernels->name);
    for (const float sign : {1.0F, -1.0F}) {
      const float none = std::copysign(nan, sign);
      kernels->log(&none, &y, 1);
      require(std::isnan(y), std::string("log of NaN with ") + kernels->name);
    }
  }
}

template <class T>
Aligned<T> read(std::int64_t count) {
  Aligned<T> made(count);
  if (std::fread(made.data(), sizeof(T), size(count), stdin) != size(count)) throw Failure{"stdin is too short"};
  return made;
}

/// int8: a step of 1 and a zero point of 3.
void multiply(const std::string& kind, std::int64_t rows, std::int64_t inputs, std::int64_t outputs, std::int64_t group) {
  const bool int8 = kind == "int8", int4 = kind == "int4", bf16 = kind == "bf16";
  const std::int64_t panels = padded(outputs) / 16, whole = padded(inputs, int8 ? 64 : int4 ? group : bf16 ? 2 : 1);
  const auto weights = read<char>(panels * whole * (int8 ? 16 : int4 ? 8 : bf16 ? 32 : 64));
  const auto scales = read<float>(int8 ? panels * 16 : int4 ? panels * 16 * whole / group : 0);
  const auto sums = read<std::int32_t>(int8 ? panels * 16 : 0);
  const auto x = read<float>(rows * inputs);
  Aligned<std::uint8_t> bytes((rows + 16) * whole);
  Aligned<std::int8_t> integers(rows * whole);
  Aligned<float> group_scales(int4 ? rows * whole / group : 0), out(rows * outputs);
  Aligned<std::int32_t> group_sums(int4 ? rows * whole / group : 0);
  Product product;
  product.matrix.numbers = int8 ? Numbers::int8 : int4 ? Numbers::int4 : bf16 ? Numbers::bf16 : Numbers::fp32;
  product.matrix.inputs = inputs;
  product.matrix.outputs = outputs;
  product.matrix.group = group;
  product.matrix.weights = weights.data();
  product.matrix.scales = scales.data();
  product.matrix.sums = sums.data();
  product.x.floats = x.data();
  product.x.ld = int8 || int4 ? whole : inputs;
  product.x.integers = int8 ? static_cast<const void*>(bytes.data()) : integers.data();
  product.x.zero = 3;
  product.x.scales = group_scales.data();
  product.x.sums = group_sums.data();
  product.finish.to.floats = out.data();
  product.finish.to.ld = outputs;
  for (const Kernels* kernels : present()) {
    Elementwise rounding{x.data(), inputs, inputs, {}};
    rounding.finish.to.bytes = bytes.data();
    rounding.finish.to.bytes_ld = whole;
    rounding.finish.to.rounding.zero = 3;
    if (int8) kernels->elementwise(rounding, 0, rows);
    if (int4) {
      const Groups work{x.data(), inputs, inputs, group, integers.data(), group_scales.data(), group_sums.data()};
      kernels->round_groups(work, 0, rows);
    }
    kernels->product(product, {0, rows, 0, panels});
    std::fwrite(out.data(), 4, size(rows * outputs), stdout);
  }
}

}  // namespace

int main(int count, char** words) {
#ifdef _WIN32
  ::_setmode(0, _O_BINARY);  // Windows would change ends of lines
  ::_setmode(1, _O_BINARY);
#endif
  if (count == 2 && words[1] == std::string("sets")) {
    for (const std::string& name : names()) {
      std::printf("%s\t%s\n", name.c_str(), named(name) ? "here" : refusal(name).c_str());
    }
    std::printf("best\t%s\nunknown\t%s\n", best().name, refusal("mmx").c_str());
    return 0;
  }
  if (count == 7 && words[1] == std::string("product")) {
    const auto number = [&](int i) { return static_cast<std::int64_t>(std::strtoll(words[i], nullptr, 10)); };
    multiply(words[2], number(3), number(4), number(5), number(6));
    return 0;
  }
  if (count != 3) {
    std::fputs("usage: kernels sets | SEED CASES | product KIND ROWS INPUTS OUTPUTS GROUP\n", stderr);
    return 2;
  }
  const std::uint64_t seed = std::strtoull(words[1], nullptr, 10), cases = std::strtoull(words[2], nullptr, 10);
  const std::vector<void (*)(Random&)> checks{
      check_elementwise, [](Random& r) { check_product_floats(r, Numbers::fp32); },
      [](Random& r) { check_product_floats(r, Numbers::bf16); }, check_product_int8, check_product_int4, check_norm,
      check_embed, check_recur, [](Random& r) { check_self_attention(r, Numbers::fp32); },
      [](Random& r) { check_self_attention(r, Numbers::bf16); }, [](Random& r) { check_shared_attention(r, Numbers::fp32); },
      [](Random& r) { check_shared_attention(r, Numbers::bf16); }, check_rounding_to_bf16, check_output, check_mathematics};
  for (std::uint64_t i = seed; i < seed + cases; ++i) {
    for (const auto& check : checks) {
      Random random(i);
      try {
        check(random);
      } catch (const Failure& failure) {
        std::printf("seed %llu: %s\n", static_cast<unsigned long long>(i), failure.what.c_str());
        return 1;
      }
    }
  }
  std::printf("%zu checks of %zu sets, %llu times\n", checks.size(), present().size(), static_cast<unsigned long long>(cases));
  return 0;
}
