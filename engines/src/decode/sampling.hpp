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

  /// A token of a row, by a number from `uniform`; -1 where all are forbidden.
  std::int32_t draw(const Ruled& row, double u);

 private:
  void choose_from(const Ruled& row);
  void keep_nucleus();

  const DecodeOptions& options_;
  std::vector<Choice> choices_;      ///< that are not forbidden, in the order of their ids
  std::vector<double> x_, weights_;  ///< of each choice
  std::vector<Choice> heap_;
  std::vector<char> inside_;
};

}  // namespace tformer
