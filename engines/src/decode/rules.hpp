// Rules on the next token: lengths, penalties, banned and forced tokens, a set of allowed outputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "decode/options.hpp"
#include "decode/trie.hpp"

namespace tformer {

/// The score of a token that must not follow.
constexpr float forbidden = -std::numeric_limits<float>::infinity();

/// A token and its log-probability after the rules.
struct Choice {
  std::int32_t token;
  float score;
};

/// Higher scores first, of equal ones the lower id.
inline bool better(const Choice& a, const Choice& b) {
  return a.score > b.score || (a.score == b.score && a.token < b.token);
}

/// A row after the rules: `scores` of all tokens by id, or, if only few are left, `few` in the order of ids.
struct Ruled {
  const float* scores = nullptr;  ///< null: `few`
  std::size_t count = 0;
  const std::vector<Choice>* few = nullptr;
};

/// The best `count` tokens of a row that are not forbidden, best first; fewer if there are fewer.
void best_of(const Ruled& row, std::size_t count, std::vector<Choice>& best);

/// Most tokens of an output, the end token among them.
std::int64_t longest_output(const DecodeOptions& options, std::int64_t positions, std::size_t src_tokens);

/// Throws Error where forced tokens and a forced end do not fit into an output.
void check_forced(std::size_t forced, std::int64_t longest, const DecodeOptions& options, const std::string& where = "");

/// The rules of a batch. Sentences are named by their index in the batch.
class Rules {
 public:
  /// Throws Error where a forced token is an end token, or more are forced than an output may have.
  Rules(const DecodeOptions& options, std::vector<std::int32_t> end_ids, std::int64_t positions,
        const std::vector<std::int32_t>& src_lengths, const std::vector<std::vector<std::int32_t>>& prefixes,
        const Trie* allowed);

  std::size_t longest(std::size_t sentence) const { return longest_[sentence]; }
  std::size_t longest() const;
  bool is_end(std::int32_t token) const;
  std::size_t end_count() const { return end_ids_.size(); }

  /// Whether step `step`, from 0, reads every token's log-probability, not only the best.
  bool needs_all(std::size_t step) const;
  /// How many of a row's best tokens may be forbidden, at a step that reads only those.
  std::size_t spare(std::size_t step) const;
  /// Whether a token is forbidden, at a step that reads only the best ones.
  bool forbids(std::int32_t token, std::size_t sentence, std::size_t step) const;
  /// Whether `apply` reads the outputs so far.
  bool reads_outputs() const;
  /// Apply every rule to a row's log-probabilities, given its output so far. The result is valid until the next call.
  Ruled apply(const float* log_probs, std::size_t vocab, const std::vector<std::int32_t>& output,
              std::size_t sentence, std::size_t step);
  /// The tokens that the options name for each sentence: ends, forced tokens, those of the allowed outputs.
  std::vector<std::vector<std::int32_t>> named() const;

 private:
  bool is_forced(std::size_t sentence, std::size_t step) const { return step < prefixes_[sentence].size(); }
  void forbid_ngrams(const std::vector<std::int32_t>& output);
  void forbid_bad_words(const std::vector<std::int32_t>& output);

  const DecodeOptions& options_;
  const std::vector<std::int32_t> end_ids_;  ///< in order
  const Trie* const allowed_;
  std::vector<std::int32_t> banned_;                 ///< in order
  std::vector<std::vector<std::int32_t>> bad_;       ///< sequences of two tokens at least
  std::vector<std::vector<std::int32_t>> prefixes_;  ///< forced tokens of each sentence
  std::vector<std::size_t> longest_, shortest_;
  std::size_t soonest_, forced_steps_, early_steps_;
  std::vector<float> row_;  ///< scores that `apply` changed
  std::vector<Choice> few_;
};

}  // namespace tformer
