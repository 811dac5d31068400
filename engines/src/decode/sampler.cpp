#include "decode/sampler.hpp"

#include <algorithm>
#include <cmath>
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

bool earlier(const Choice& a, const Choice& b) { return a.token < b.token; }

}  // namespace

double uniform(std::uint64_t seed, std::uint64_t request, std::uint64_t sample, std::uint64_t step) {
  const std::uint64_t mixed = mix(mix(mix(mix(seed) ^ request) ^ sample) ^ step);
  return static_cast<double>(mixed >> 11U) * 0x1p-53;
}

void Sampler::choose_from(const Ruled& row) {
  const auto top_k = static_cast<std::size_t>(options_.top_k);
  if (top_k && top_k < row.count) {
    best_of(row, top_k, choices_);
    std::sort(choices_.begin(), choices_.end(), earlier);
    return;
  }
  choices_.resize(row.count);
  std::size_t count = 0;
  for (std::size_t i = 0; i < row.count; ++i) {
    choices_[count] = row.scores ? Choice{static_cast<std::int32_t>(i), row.scores[i]} : (*row.few)[i];
    count += choices_[count].score > -std::numeric_limits<float>::infinity() ? 1 : 0;
  }
  choices_.resize(count);
}

/// Sets the weights of all but the best tokens, whose sum reaches `top_p`, to 0.
void Sampler::keep_nucleus() {
  const double enough = options_.top_p * std::accumulate(weights_.begin(), weights_.end(), 0.0);
  heap_ = choices_;
  inside_.assign(choices_.size(), 0);
  // A heap, as the best few are enough most of the time.
  const auto worse = [](const Choice& a, const Choice& b) { return better(b, a); };
  std::make_heap(heap_.begin(), heap_.end(), worse);
  for (double before = 0; !heap_.empty() && before < enough; heap_.pop_back()) {
    std::pop_heap(heap_.begin(), heap_.end(), worse);
    const auto place = std::lower_bound(choices_.begin(), choices_.end(), heap_.back(), earlier) - choices_.begin();
    inside_[static_cast<std::size_t>(place)] = 1;
    before += weights_[static_cast<std::size_t>(place)];
  }
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    if (!inside_[i]) weights_[i] = 0;
  }
}

std::int32_t Sampler::draw(const Ruled& row, double u) {
  choose_from(row);
  if (choices_.empty()) return -1;
  const std::size_t count = choices_.size();
  x_.resize(count);
  weights_.resize(count);
  for (std::size_t i = 0; i < count; ++i) x_[i] = static_cast<double>(choices_[i].score) / options_.temperature;
  const double highest = *std::max_element(x_.begin(), x_.end());
  for (std::size_t i = 0; i < count; ++i) weights_[i] = std::exp(x_[i] -= highest);
  if (options_.top_p < 1) keep_nucleus();
  if (options_.min_p > 0) {
    const double least = std::log(options_.min_p);
    for (std::size_t i = 0; i < count; ++i) {
      if (x_[i] < least) weights_[i] = 0;
    }
  }
  const double total = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  const double target = std::min(u * total, std::nextafter(total, 0.0));
  double reached = 0;
  for (std::size_t i = 0; i < count; ++i) {
    reached += weights_[i];
    if (reached > target) return choices_[i].token;
  }
  return choices_.back().token;  // not reached: `target` is below the last sum
}

}  // namespace tformer
