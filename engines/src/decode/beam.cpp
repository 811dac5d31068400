// The best K hypotheses of each sentence; greedy search is a beam of one.
#include <algorithm>

#include "decode/search.hpp"

namespace tformer {
namespace {

class Beam final : public Search {
 public:
  Beam(const Engine& engine, const Batch& batch, const DecodeOptions& options, const Hooks& hooks)
      : Search(engine, batch, options, hooks),
        beams_(static_cast<std::size_t>(options.beams)),
        // One end token of each kind may stand before the last that goes on.
        wanted_(options.greedy() ? 1 : beams_ + rules_.end_count()),
        ranks_(options.greedy() ? 1 : beams_ * (1 + rules_.end_count())),
        enough_(static_cast<std::size_t>(options.patience * static_cast<double>(beams_) + 0.5)),
        found_(count()),
        ended_(count(), 0) {}

  std::vector<std::vector<Hypothesis>> results() override {
    for (auto& kept : found_) kept.resize(std::min(kept.size(), static_cast<std::size_t>(options_.n_best)));
    return std::move(found_);
  }

 private:
  void advance(const Scores& scores, bool full) override {
    const std::size_t length = step() + 1;
    for (std::size_t b = 0; b < count(); ++b) {
      const std::size_t s = sentence(b);
      const bool last = rules_.longest(s) <= length;
      rank(scores, full, b);
      next_.clear();
      for (std::size_t n = 0; n < ranked_.size(); ++n) {
        const Candidate& one = ranked_[n];
        const bool ends = rules_.is_end(one.token);
        if (n < beams_ && (ends || last)) collect(s, output(b, one));
        if (!ends && next_.size() < beams_) next_.push_back({one.value, one.score, one.row, one.token, 0});
      }
      if (next_.empty() && found_[s].empty()) {
        for (std::size_t row = 0; row < width_; ++row) {
          const std::size_t place = b * width_ + row;
          if (alive(place)) collect(s, stuck(b, row));
        }
      }
      if (!last && !next_.empty() && !stops(s, length)) go_on(b);
    }
  }

  /// The best continuations of a sentence, best first; ties by the lower row, then in the row's order.
  void rank(const Scores& scores, bool full, std::size_t b) {
    ranked_.clear();
    for (std::size_t row = 0; row < width_; ++row) {
      const std::size_t place = b * width_ + row;
      if (!alive(place)) continue;
      if (full) best_of(ruled(scores, b, row), wanted_, best_);
      else best_listed(scores, b, place);
      const float* log_probs = full ? scores.log_probs.data() + place * vocab_ : nullptr;
      for (const Choice& choice : best_) {
        const double plain = full ? log_probs[static_cast<std::size_t>(choice.token)] : choice.score;
        ranked_.push_back({values_[place] + static_cast<double>(choice.score), scores_[place] + plain, sentences_[b],
                           static_cast<std::int32_t>(row), choice.token, static_cast<std::int32_t>(ranked_.size())});
      }
    }
    const auto first = [](const Candidate& x, const Candidate& y) {
      return x.value > y.value || (!(y.value > x.value) && x.rank < y.rank);
    };
    const std::size_t most = std::min(ranks_, ranked_.size());
    if (width_ > 1) {
      std::partial_sort(ranked_.begin(), ranked_.begin() + static_cast<std::ptrdiff_t>(most), ranked_.end(), first);
    }
    ranked_.resize(most);
    if (!hooks_.on_step) return;
    for (std::size_t n = 0; n < most; ++n) {
      candidates_.push_back(ranked_[n]);
      candidates_.back().rank = static_cast<std::int32_t>(n);
    }
  }

  /// The best tokens of a row for which the step returned only its best ones.
  void best_listed(const Scores& scores, std::size_t b, std::size_t place) {
    best_.clear();
    const auto listed = static_cast<std::size_t>(scores.best);
    const std::int32_t* ids = scores.ids.data() + place * listed;
    const float* values = scores.scores.data() + place * listed;
    for (std::size_t i = 0; i < listed && best_.size() < wanted_; ++i) {
      if (values[i] > forbidden && !rules_.forbids(ids[i], sentence(b), step())) {
        best_.push_back({checked(ids[i]), values[i]});
      }
    }
  }

  /// Count an output, and keep it if it is among the best; ties by the earlier.
  void collect(std::size_t s, Hypothesis output) {
    ++ended_[s];
    auto& kept = found_[s];
    const auto place = std::upper_bound(kept.begin(), kept.end(), output.value,
                                        [](double value, const Hypothesis& other) { return value > other.value; });
    kept.insert(place, std::move(output));
    if (kept.size() > beams_) kept.pop_back();
  }

  /// Whether the stop rule ends a sentence whose live rows are in `next_`, best first.
  bool stops(std::size_t s, std::size_t length) const {
    if (options_.stop == "count") return ended_[s] >= enough_;
    if (found_[s].size() < beams_) return false;
    // Sums only fall, so a hypothesis is worth at most its sum now, divided by the most favourable length.
    if (options_.stop == "exact") length = options_.length_penalty > 0 ? rules_.longest(s) : length + 1;
    return next_.front().value / length_norm(length, options_) <= found_[s].back().value;
  }

  const std::size_t beams_, wanted_, ranks_, enough_;
  std::vector<std::vector<Hypothesis>> found_;  ///< the K best outputs of every sentence of the batch
  std::vector<std::size_t> ended_;              ///< how many have ended
  std::vector<Candidate> ranked_;
  std::vector<Choice> best_;
};

}  // namespace

std::unique_ptr<Search> make_beam(const Engine& engine, const Batch& batch, const DecodeOptions& options,
                                  const Hooks& hooks) {
  return std::make_unique<Beam>(engine, batch, options, hooks);
}

}  // namespace tformer
