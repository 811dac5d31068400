// Draws tokens from log-probabilities: the same on every backend for the same seed.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/options.hpp"
#include "decode/rules.hpp"

namespace tformer {

/// A number in [0, 1), a function of its arguments alone.
double uniform(std::uint64_t seed, std::uint64_t request, std::uint64_t sample, std::uint64_t step);

/// Draws with the filters of some options; keeps its memory from draw to draw.
class Sampler {
 public:
  explicit Sampler(const DecodeOptions& options) : options_(options) {}

  /// The tokens to draw from, in the order of their ids.
  std::vector<Choice>& choices() { return choices_; }
  /// A token of `choices`, by a number from `uniform`; -1 where all are forbidden. Changes them.
  std::int32_t draw(double u);

 private:
  void keep_best();
  void keep_nucleus();

  const DecodeOptions& options_;
  std::vector<Choice> choices_;
  std::vector<double> x_, weights_;  ///< of each choice
  std::vector<std::size_t> order_;
  std::vector<char> inside_;
};

}  // namespace tformer
