// The interface of every backend: encode sources once, run a step per token, reorder rows. The search knows only this.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "errors.hpp"
#include "limits.hpp"
#include "spec.hpp"

namespace tformer {

/// A count of sentences, rows or positions as an index type; it is never negative.
inline std::size_t size(std::int64_t number) { return static_cast<std::size_t>(number); }

/// What the search needs to know about the network.
struct ModelInfo {
  std::int32_t src_vocab = 0;
  std::int32_t tgt_vocab = 0;
  std::int32_t pad_id = 0;
  std::int32_t eos_id = 0;
  std::int32_t start_id = 0;
};

/// What a search will ask of a state, for engines that choose buffer sizes or run steps ahead of the search.
struct Outlook {
  std::int64_t beams = 0;   ///< most rows per sentence; 0: as many as the engine takes, which no search asks for
  std::int64_t tokens = 0;  ///< most steps; 0: likewise
  std::vector<std::vector<std::int32_t>> required = {};  ///< for each source, tokens that must be scored
  std::int32_t end_id = -1;  ///< the token that ends an output; -1: none does
  bool drawn = false;        ///< tokens are sampled, so that an engine cannot predict them
};

/// Result of a step: scores of the next token of every row.
struct Scores {
  std::int64_t best = 0;                ///< k
  std::vector<std::int32_t> ids;        ///< (B, K, k), best first, equal scores by the lower id
  std::vector<float> scores;            ///< (B, K, k) log-probabilities
  std::vector<float> log_probs;         ///< (B, K, V), only on request
  std::vector<float> attention;         ///< (B, K, S), only on request; 0 at padding
};

/// What a decode carries between steps: caches and lengths. Opaque; belongs to the engine that made it.
class State {
 public:
  virtual ~State() = default;
  /// Whether a change that failed has cost it its caches, so that no sentence can continue.
  virtual bool lost() const { return false; }
};

/// The error of engines whose sentences are all at the same step.
inline Error cannot_join() {
  return Error(Status::limit, spec::cannot_join("ort-cpu, native or trt"));
}

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
  /// Whether sentences can join a state that has taken steps.
  virtual bool admits() const { return false; }
  /// Load now what `admit` needs, so that no step waits for it. Throws Error.
  virtual void prepare_to_admit() {}
  /// Append sentences to the state, at their first step, with as many rows as the others have. The outlook is that of
  /// all that then run, but `required` has the lists of those that join. Throws Error; the state is then as it was, or
  /// `lost`.
  virtual void admit(State&, const std::vector<std::int32_t>&, const std::vector<std::int32_t>&, const Outlook&) {
    throw cannot_join();
  }
  /// How many best tokens the next step returns per row, given that many beams.
  virtual std::int64_t best(std::int64_t beams, const State& state) const = 0;
  /// Feed the last token of every row, (B, K). `scores` is reused from step to step.
  virtual void step(const std::vector<std::int32_t>& tokens, State& state, bool full, bool attention,
                    Scores& scores) = 0;
  /// Make row i of the next step continue row parents[i], (B', K'), counted over B*K; `sentences` (B') are those
  /// that stay. Sentences that are admitted later may take the places of those that left.
  virtual void reorder(State& state, const std::vector<std::int32_t>& parents,
                       const std::vector<std::int32_t>& sentences) = 0;
  /// Sources (B, S) to the encoder's output (B, S, E), with undefined values at padding. Throws Error where the
  /// variant was exported without it.
  virtual std::vector<float> memory(const std::vector<std::int32_t>&, const std::vector<std::int32_t>&) {
    throw Error(Status::limit, spec::no_memory_graph);
  }
  /// The encoder's outputs, for comparison: 2L of (B, H, S, D).
  virtual std::vector<std::vector<float>> cross_keys_values(const State& state) const = 0;
};

}  // namespace tformer
