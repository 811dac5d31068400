// Sampling: independent samples, one per row.
#include <algorithm>

#include "decode/sampler.hpp"
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
    const std::int32_t token =
        sampler_.draw(full ? ruled(scores, b, row) : listed(scores, b, row),
                      uniform(static_cast<std::uint64_t>(options_.seed), static_cast<std::uint64_t>(request),
                              static_cast<std::uint64_t>(sample), step()));
    if (token < 0) {
      found = stuck(b, row);
      return;
    }
    const double sum = scores_[place] + static_cast<double>(plain(scores, full, place, token));
    const Candidate drawn{sum, sum, sentences_[b], static_cast<std::int32_t>(row), token, sample};
    if (hooks_.on_step) candidates_.push_back(drawn);
    if (rules_.is_end(token) || rules_.longest(s) <= step() + 1) found = output(b, drawn);
    else next_.push_back({sum, sum, static_cast<std::int32_t>(row), token, sample});
  }

  /// Apply the rules to a row for which the step returned only its best tokens.
  Ruled listed(const Scores& scores, std::size_t b, std::size_t row) {
    few_.clear();
    const auto count = static_cast<std::size_t>(scores.best);
    const std::size_t begin = (b * width_ + row) * count;
    for (std::size_t i = begin; i < begin + count; ++i) {
      if (!rules_.forbids(scores.ids[i], sentence(b), step())) few_.push_back({scores.ids[i], scores.scores[i]});
    }
    std::sort(few_.begin(), few_.end(), [](const Choice& x, const Choice& y) { return x.token < y.token; });
    return {nullptr, few_.size(), &few_};
  }

  /// The log-probability of a token of a row.
  float plain(const Scores& scores, bool full, std::size_t place, std::int32_t token) const {
    if (full) return scores.log_probs[place * vocab_ + static_cast<std::size_t>(token)];
    const auto count = static_cast<std::size_t>(scores.best);
    const auto ids = scores.ids.begin() + static_cast<std::ptrdiff_t>(place * count);
    const auto found = std::find(ids, ids + scores.best, checked(token));
    return scores.scores[place * count + static_cast<std::size_t>(found - ids)];
  }

  Sampler sampler_;
  std::vector<Choice> few_;
  std::vector<std::vector<Hypothesis>> found_;
};

}  // namespace

std::unique_ptr<Search> make_sampling(const Engine& engine, const Batch& batch, const DecodeOptions& options,
                                      const Hooks& hooks) {
  return std::make_unique<Sampling>(engine, batch, options, hooks);
}

}  // namespace tformer
