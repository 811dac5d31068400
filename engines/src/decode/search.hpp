// The search classes: from a step's scores to the rows of the next step. Rows of a sentence are adjacent.
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

  /// Advance by a step's scores; `full`: with all log-probabilities. Throws NotNumbers, if the search is strict.
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
  /// End all sentences.
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
  /// Whether a row is in use; others are padding beside sentences with more rows.
  bool alive(std::size_t row) const { return live_[row]; }
  std::size_t sentence(std::size_t b) const { return static_cast<std::size_t>(sentences_[b]); }
  std::size_t step() const { return history_.steps(); }
  /// Apply the rules to a row of all log-probabilities.
  Ruled ruled(const Scores& scores, std::size_t b, std::size_t row);
  std::int32_t checked(std::int32_t token) const;
  /// The output of sentence b, ended by an end token or by a limit.
  Hypothesis output(std::size_t b, const Candidate& last) const;
  /// The output of a row for which every next token is forbidden.
  Hypothesis stuck(std::size_t b, std::size_t row) const;
  /// Continue a sentence with the rows in `next_`.
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
  std::vector<Row> next_;                ///< rows with which a sentence continues
  std::vector<Candidate> candidates_;          ///< the step's candidates, for `on_step`

 private:
  void keep();
  void describe(Hypothesis& output, std::size_t b, std::size_t row) const;

  History history_;
  std::vector<std::int32_t> tokens_;    ///< (B, K) input of the next step
  std::vector<std::int32_t> parents_;   ///< (B', K') rows of the step before, counted over B * K
  std::vector<std::int32_t> kept_;      ///< (B') sentences of the step before that continue
  std::vector<std::size_t> begins_;     ///< where the rows of each of them begin in `rows_`
  std::vector<Row> rows_;
  std::vector<std::int32_t> written_;   ///< an output so far
  bool rows_moved_ = false;
};

/// Make the search that the options name. Throws Error where the engine cannot do it. All arguments must
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

/// Check that the best log-probability of every row (B, K) in use is finite. Throws NotNumbers.
void require_numbers(const Scores& scores, const std::vector<std::int64_t>& numbers,
                     const std::vector<std::int32_t>& sentences, const std::vector<char>* live, std::size_t step);

}  // namespace tformer
