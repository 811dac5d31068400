#include "decode/sampling.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>

namespace tformer {
namespace {

/// One output of SplitMix64. Source: Steele et al. 2014, "Fast splittable pseudorandom number generators".
std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15U;
  z = (z ^ (z >> 30U)) * 0xBF58476D1CE4E5B9U;
  z = (z ^ (z >> 27U)) * 0x94D049BB133111EBU;
  return z ^ (z >> 31U);
}

}  // namespace

double uniform(std::uint64_t seed, std::uint64_t request, std::uint64_t sample, std::uint64_t step) {
  const std::uint64_t mixed = mix(mix(mix(mix(seed) ^ request) ^ sample) ^ step);
  return static_cast<double>(mixed >> 11U) * 0x1p-53;
}

void Sampler::keep_best() {
  const auto count = static_cast<std::size_t>(options_.top_k);
  if (!count || count >= choices_.size()) return;
  std::nth_element(choices_.begin(), choices_.begin() + static_cast<std::ptrdiff_t>(count), choices_.end(), better);
  choices_.resize(count);
  std::sort(choices_.begin(), choices_.end(), [](const Choice& a, const Choice& b) { return a.token < b.token; });
}

/// Sets the weights of all but the best tokens to 0, those whose sum reaches `top_p` left out.
void Sampler::keep_nucleus() {
  const double enough = options_.top_p * std::accumulate(weights_.begin(), weights_.end(), 0.0);
  order_.resize(choices_.size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  inside_.assign(choices_.size(), 0);
  // A heap, as the best few are enough most of the time.
  const auto worse = [this](std::size_t a, std::size_t b) { return better(choices_[b], choices_[a]); };
  std::make_heap(order_.begin(), order_.end(), worse);
  for (double before = 0; !order_.empty() && before < enough; order_.pop_back()) {
    std::pop_heap(order_.begin(), order_.end(), worse);
    inside_[order_.back()] = 1;
    before += weights_[order_.back()];
  }
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    if (!inside_[i]) weights_[i] = 0;
  }
}

std::int32_t Sampler::draw(double u) {
  const auto possible = [](const Choice& choice) { return choice.score > -std::numeric_limits<float>::infinity(); };
  choices_.erase(std::remove_if(choices_.begin(), choices_.end(), std::not_fn(possible)), choices_.end());
  if (choices_.empty()) return -1;
  keep_best();
  x_.clear();
  for (const Choice& choice : choices_) x_.push_back(static_cast<double>(choice.score) / options_.temperature);
  const double highest = *std::max_element(x_.begin(), x_.end());
  weights_.clear();
  for (double& x : x_) weights_.push_back(std::exp(x -= highest));
  if (options_.top_p < 1) keep_nucleus();
  if (options_.min_p > 0) {
    const double least = std::log(options_.min_p);
    for (std::size_t i = 0; i < x_.size(); ++i) {
      if (x_[i] < least) weights_[i] = 0;
    }
  }
  const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  const double target = std::min(u * total, std::nextafter(total, 0.0));
  double reached = 0;
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    reached += weights_[i];
    if (reached > target) return choices_[i].token;
  }
  return choices_.back().token;  // not reached: `target` is below the last sum
}

}  // namespace tformer
