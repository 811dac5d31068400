// Draws tokens from log-probabilities: the same on every backend for the same seed.
#pragma once

#include <cstdint>
#include <vector>

#include "decode/options.hpp"
#include "decode/rules.hpp"

namespace tformer {

/// A pseudorandom number in [0, 1) that depends only on the arguments.
double uniform(std::uint64_t seed, std::uint64_t request, std::uint64_t sample, std::uint64_t step);

/// Samples with the options' filters; reuses its memory.
class Sampler {
 public:
  explicit Sampler(const DecodeOptions& options) : options_(options) {}

  /// Sample a token of a row, by a number from `uniform`; -1 where all are forbidden.
  std::int32_t draw(const Ruled& row, double u);

 private:
  void choose_from(const Ruled& row);
  void keep_nucleus();

  const DecodeOptions& options_;
  std::vector<Choice> choices_;      ///< tokens that are not forbidden, in the order of ids
  std::vector<double> x_, weights_;  ///< one for each choice
  std::vector<Choice> heap_;
  std::vector<char> inside_;
};

}  // namespace tformer
