// Independent samples, one a row.
#include <algorithm>

#include "decode/sampling.hpp"
#include "decode/search.hpp"

namespace tformer {
namespace {

class Sampling final : public Search {
 public:
  Sampling(const Engine& engine, const Batch& batch, const DecodeOptions& options, const Hooks& hooks)
      : Search(engine, batch, options, hooks),
        sampler_(options),
        found_(count(), std::vector<Hypothesis>(static_cast<std::size_t>(options.n_best))) {}

  std::vector<std::vector<Hypothesis>> results() override { return std::move(found_); }

 private:
  void advance(const Scores& scores, bool full) override {
    const bool first = step() == 0;
    for (std::size_t b = 0; b < count(); ++b) {
      next_.clear();
      // At the first step all samples continue the one row.
      const std::size_t samples = first ? static_cast<std::size_t>(options_.n_best) : width_;
      for (std::size_t n = 0; n < samples; ++n) {
        const std::size_t row = first ? 0 : n, place = b * width_ + row;
        if (alive(place)) extend(scores, full, b, row, first ? static_cast<std::int32_t>(n) : samples_[place]);
      }
      if (!next_.empty()) go_on(b);
    }
  }

  /// Draw the next token of a sample.
  void extend(const Scores& scores, bool full, std::size_t b, std::size_t row, std::int32_t sample) {
    const std::size_t s = sentence(b), place = b * width_ + row;
    Hypothesis& found = found_[s][static_cast<std::size_t>(sample)];
    const std::int64_t request = batch_.numbers.empty() ? sentences_[b] : batch_.numbers[s];
    fill(scores, full, b, row);
    const std::int32_t token =
        sampler_.draw(uniform(static_cast<std::uint64_t>(options_.seed), static_cast<std::uint64_t>(request),
                              static_cast<std::uint64_t>(sample), step()));
    if (token < 0) {
      found = output(b, row, -1, values_[place], scores_[place]);
      return;
    }
    const double sum = scores_[place] + static_cast<double>(plain(scores, full, place, token));
    if (hooks_.on_step) said_.push_back({sum, sum, sentences_[b], static_cast<std::int32_t>(row), token, sample});
    if (rules_.is_end(token) || rules_.longest(s) <= step() + 1) found = output(b, row, token, sum, sum);
    else next_.push_back({sum, sum, static_cast<std::int32_t>(row), token, sample});
  }

  /// Give the sampler what the rules leave of a row.
  void fill(const Scores& scores, bool full, std::size_t b, std::size_t row) {
    std::vector<Choice>& choices = sampler_.choices();
    choices.clear();
    if (full) {
      const Ruled left = ruled(scores, b, row);
      if (left.few) choices = *left.few;
      for (std::size_t v = 0; left.scores && v < left.count; ++v) {
        choices.push_back({static_cast<std::int32_t>(v), left.scores[v]});
      }
      return;
    }
    const auto listed = static_cast<std::size_t>(scores.best);
    const std::size_t begin = (b * width_ + row) * listed;
    for (std::size_t i = begin; i < begin + listed; ++i) {
      if (!rules_.forbids(scores.ids[i], sentence(b), step())) choices.push_back({scores.ids[i], scores.scores[i]});
    }
    std::sort(choices.begin(), choices.end(), [](const Choice& x, const Choice& y) { return x.token < y.token; });
  }

  /// The log-probability of a token of a row.
  float plain(const Scores& scores, bool full, std::size_t place, std::int32_t token) const {
    if (full) return scores.log_probs[place * vocab_ + static_cast<std::size_t>(token)];
    const auto listed = static_cast<std::size_t>(scores.best);
    const auto ids = scores.ids.begin() + static_cast<std::ptrdiff_t>(place * listed);
    const auto found = std::find(ids, ids + static_cast<std::ptrdiff_t>(listed), checked(token));
    return scores.scores[place * listed + static_cast<std::size_t>(found - ids)];
  }

  Sampler sampler_;
  std::vector<std::vector<Hypothesis>> found_;
};

}  // namespace

std::unique_ptr<Search> make_sampling(const Engine& engine, const Batch& batch, const DecodeOptions& options,
                                      const Hooks& hooks) {
  return std::make_unique<Sampling>(engine, batch, options, hooks);
}

}  // namespace tformer
