// What the search needs of an engine. Mirrors tformer_deploy/engines/base.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace tformer {

/// The largest request that an engine takes.
struct Limits {
  std::int64_t batch = 0;       ///< sentences
  std::int64_t src_tokens = 0;  ///< source length, end token included
  std::int64_t tgt_tokens = 0;  ///< decoding steps
  std::int64_t beams = 0;       ///< rows of a sentence
};

/// What the search needs to know of the network.
struct ModelInfo {
  std::int32_t src_vocab = 0;
  std::int32_t tgt_vocab = 0;
  std::int32_t pad_id = 0;
  std::int32_t eos_id = 0;
  std::int32_t start_id = 0;
};

/// What a search will ask of a state, for engines that choose sizes by it.
struct Outlook {
  std::int64_t beams = 0;   ///< most rows of a sentence
  std::int64_t tokens = 0;  ///< most steps
  std::vector<std::vector<std::int32_t>> required;  ///< of each source, tokens that must be scored
};

/// What a step says of the next token of every row.
struct Scores {
  std::int64_t best = 0;                ///< k
  std::vector<std::int32_t> ids;        ///< (B, K, k), best first, equal scores by the lower id
  std::vector<float> scores;            ///< (B, K, k) log-probabilities
  std::vector<float> log_probs;         ///< (B, K, V), only where asked for
  std::vector<float> attention;         ///< (B, K, S), only where asked for; 0 at padding
};

/// What a decode carries between steps: caches and lengths. Opaque; belongs to the engine that made it.
class State {
 public:
  virtual ~State() = default;
};

/// Runs one model for one thread.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual const ModelInfo& model() const = 0;
  virtual const Limits& limits() const = 0;
  /// Whether a step can return attention.
  virtual bool attention() const = 0;
  /// src_ids (B, S) right-padded, src_lengths (B) -> the state of B sentences with one row each.
  virtual std::unique_ptr<State> encode(const std::vector<std::int32_t>& src_ids,
                                        const std::vector<std::int32_t>& src_lengths, const Outlook& outlook) = 0;
  /// How many best tokens the next step returns per row with that many beams.
  virtual std::int64_t best(std::int64_t beams, const State& state) const = 0;
  /// Feed the last token of every row, (B, K). `scores` is reused from step to step.
  virtual void step(const std::vector<std::int32_t>& tokens, State& state, bool full, bool attention,
                    Scores& scores) = 0;
  /// Make row i of the next step continue row parents[i], (B', K'), counted over B*K; `sentences` (B') are those
  /// that stay.
  virtual void reorder(State& state, const std::vector<std::int32_t>& parents,
                       const std::vector<std::int32_t>& sentences) = 0;
  /// The encoder's outputs, for comparison: 2L of (B, H, S, D).
  virtual std::vector<std::vector<float>> cross_keys_values(const State& state) const = 0;
};

}  // namespace tformer
