// What a search chooses by what a step found: beams and samples. Rows of a sentence stand together.
#pragma once

#include <memory>
#include <vector>

#include "decode/decode.hpp"
#include "decode/history.hpp"
#include "decode/rules.hpp"

namespace tformer {

/// Live rows of the sentences that have not ended.
class Search {
 public:
  Search(const Engine& engine, const Batch& batch, const DecodeOptions& options, const Hooks& hooks);
  virtual ~Search() = default;

  /// Advance by what a step found; `full`: it has all log-probabilities. Throws NotNumbers, if the search is strict.
  void take(const Scores& scores, bool full);
  /// The outputs of each sentence, best first, or its samples. They are moved.
  virtual std::vector<std::vector<Hypothesis>> results() = 0;

  /// Whether the next step must return every log-probability.
  bool needs_all(const State& state) const;
  Outlook outlook() const;
  const Batch& batch() const { return batch_; }
  bool attention() const { return options_.attention(); }
  /// Sentences of the next step, and rows of each.
  std::size_t count() const { return sentences_.size(); }
  std::size_t width() const { return width_; }
  /// Let no sentence go on.
  void stop();
  bool done() const { return sentences_.empty(); }
  const std::vector<std::int32_t>& tokens() const { return tokens_; }
  bool rows_moved() const { return rows_moved_; }
  const std::vector<std::int32_t>& parents() const { return parents_; }
  const std::vector<std::int32_t>& kept() const { return kept_; }

 protected:
  struct Row {
    double value, score;
    std::int32_t parent;  ///< row of the same sentence
    std::int32_t token;
    std::int32_t sample;
  };

  /// Choose for every sentence: `next_` and `go_on`, or its outputs.
  virtual void advance(const Scores& scores, bool full) = 0;
  /// Whether anybody reads a row; others fill up beside those of sentences that have more.
  bool alive(std::size_t row) const { return live_[row]; }
  std::size_t sentence(std::size_t b) const { return static_cast<std::size_t>(sentences_[b]); }
  std::size_t step() const { return history_.steps(); }
  /// What the rules leave of a row of all log-probabilities.
  Ruled ruled(const Scores& scores, std::size_t b, std::size_t row);
  std::int32_t checked(std::int32_t token) const;
  /// The output of sentence b whose last token is an end token, or cut off by a limit.
  Hypothesis output(std::size_t b, const Candidate& last) const;
  /// The output of a row that no token may follow.
  Hypothesis stuck(std::size_t b, std::size_t row) const;
  /// Let a sentence go on with the rows in `next_`.
  void go_on(std::size_t b);

  const DecodeOptions& options_;
  const Hooks& hooks_;
  const Engine& engine_;
  const Batch& batch_;
  Rules rules_;
  const std::size_t vocab_;
  std::size_t width_ = 1;                ///< rows of a sentence
  std::vector<std::int32_t> sentences_;  ///< (B) index in the batch
  std::vector<double> values_, scores_;  ///< (B, K) sums after the rules, and of plain log-probabilities
  std::vector<std::int32_t> samples_;    ///< (B, K) numbers of samples
  std::vector<char> live_;               ///< (B, K)
  std::vector<Row> next_;                ///< rows with which a sentence goes on
  std::vector<Candidate> said_;          ///< what the step found, for `on_step`

 private:
  void keep();
  void describe(Hypothesis& output, std::size_t b, std::size_t row) const;

  History history_;
  std::vector<std::int32_t> tokens_;    ///< (B, K) what the next step is fed
  std::vector<std::int32_t> parents_;   ///< (B', K') rows of the step before, counted over B * K
  std::vector<std::int32_t> kept_;      ///< (B') sentences of the step before that go on
  std::vector<std::size_t> begins_;     ///< where the rows of each of them begin in `rows_`
  std::vector<Row> rows_;
  std::vector<std::int32_t> written_;   ///< an output so far
  bool rows_moved_ = false;
};

/// The search that the options name. Throws Error where they ask for what the engine cannot do. All arguments must
/// outlive it.
std::unique_ptr<Search> make_search(const Engine& engine, const Batch& batch, const DecodeOptions& options,
                                    const Hooks& hooks);

/// Refuse options that the engine or the model cannot follow, whatever the source. Throws Error.
void check_options(const Engine& engine, const DecodeOptions& options);

std::unique_ptr<Search> make_beam(const Engine& engine, const Batch& batch, const DecodeOptions& options,
                                  const Hooks& hooks);
std::unique_ptr<Search> make_sampling(const Engine& engine, const Batch& batch, const DecodeOptions& options,
                                      const Hooks& hooks);

/// What a sum of `length` tokens is divided by.
double length_norm(std::size_t length, const DecodeOptions& options);

/// Stop at rows (B, K) that are read and whose best log-probability is no number. Throws NotNumbers.
void require_numbers(const Scores& scores, const std::vector<std::int64_t>& numbers,
                     const std::vector<std::int32_t>& sentences, const std::vector<char>* live, std::size_t step);

}  // namespace tformer
