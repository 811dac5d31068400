#include "speed.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <vector>

#include "errors.hpp"
#include "kernels/kernels.hpp"
#include "settings.hpp"

namespace tformer::python {
namespace {

using namespace tformer::kernels;

constexpr std::int64_t size = 512;  // rows, inputs and outputs: large enough for the kernels, small enough for a cache
constexpr int tries = 3;            // the best counts, as other work on the machine only takes away
constexpr double try_seconds = 0.02;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

/// A product of ones.
class Work {
 public:
  explicit Work(Numbers numbers) {
    const auto bytes = static_cast<std::size_t>(size * size) * (numbers == Numbers::int8 ? 1 : sizeof(float));
    weights_ = ones(bytes, numbers);
    x_ = ones(bytes, numbers);
    scales_ = ones(static_cast<std::size_t>(size) * sizeof(float), Numbers::fp32);
    sums_ = ones(static_cast<std::size_t>(size) * sizeof(float), Numbers::fp32);
    out_.resize(static_cast<std::size_t>(size * size));
    product_.matrix.numbers = numbers;
    product_.matrix.inputs = product_.matrix.outputs = product_.x.ld = product_.finish.to.ld = size;
    product_.matrix.weights = weights_.get();
    product_.finish.to.floats = out_.data();
    if (numbers == Numbers::fp32) {
      product_.x.floats = static_cast<const float*>(x_.get());
      return;
    }
    product_.matrix.scales = static_cast<const float*>(scales_.get());
    product_.matrix.sums = static_cast<const std::int32_t*>(sums_.get());
    product_.x.integers = x_.get();
  }
  /// Operations a second.
  double rate() const {
    using clock = std::chrono::steady_clock;
    const auto begin = clock::now();
    double seconds = 0, count = 0;
    while (seconds < try_seconds) {
      best().product(product_, {0, size, 0, size / lanes});
      ++count;
      seconds = std::chrono::duration<double>(clock::now() - begin).count();
    }
    return 2 * count * static_cast<double>(size * size * size) / seconds;
  }

 private:
  std::unique_ptr<void, Free> weights_, x_, scales_, sums_;
  std::vector<float> out_;
  Product product_;

  static std::unique_ptr<void, Free> ones(std::size_t bytes, Numbers numbers) {
    std::unique_ptr<void, Free> made(std::aligned_alloc(64, bytes));
    if (!made) throw std::bad_alloc();
    if (numbers == Numbers::int8) std::fill_n(static_cast<std::uint8_t*>(made.get()), bytes, std::uint8_t{1});
    else std::fill_n(static_cast<float*>(made.get()), bytes / sizeof(float), 1.0F);
    return made;
  }
};

}  // namespace

double product_rate(const std::string& numbers, int threads) {
  if (numbers != "fp32" && numbers != "int8") {
    throw Error(Status::usage, "numbers=" + numbers + ": must be fp32 or int8");
  }
  if (threads < 1 || threads > most_parallel()) {
    throw Error(Status::usage, "threads=" + std::to_string(threads) + ": must be a whole number from 1 to " +
                                   std::to_string(most_parallel()));
  }
  std::vector<Work> works;
  for (int i = 0; i < threads; ++i) works.emplace_back(numbers == "int8" ? Numbers::int8 : Numbers::fp32);
  double most = 0;
  for (int i = 0; i < tries; ++i) {
    std::vector<double> rates(works.size());
    std::vector<std::thread> others;
    std::exception_ptr failure;
    try {
      for (std::size_t j = 1; j < works.size(); ++j) others.emplace_back([&, j] { rates[j] = works[j].rate(); });
      rates[0] = works[0].rate();
    } catch (...) {  // the system gives no more threads: those that run are joined first
      failure = std::current_exception();
    }
    for (std::thread& other : others) other.join();
    if (failure) std::rethrow_exception(failure);
    double sum = 0;
    for (const double rate : rates) sum += rate;
    most = std::max(most, sum);
  }
  return most;
}

}  // namespace tformer::python
