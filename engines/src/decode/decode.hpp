// Decoding over the Engine interface: greedy, beam search, sampling, scoring. docs/decoding.md has the rules.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <vector>

#include "decode/options.hpp"
#include "decode/trie.hpp"
#include "engine.hpp"

namespace tformer {

/// Sources to decode together.
struct Batch {
  std::vector<std::int32_t> src_ids;      ///< (B, S) right-padded, as the encoder sees them
  std::vector<std::int32_t> src_lengths;  ///< (B)
  std::vector<std::int64_t> numbers;      ///< request numbers, for seeds and messages; empty: the index in the batch
  std::vector<std::vector<std::int32_t>> prefixes;  ///< tokens that each output begins with; may be empty

  std::size_t width() const { return src_lengths.empty() ? 0 : src_ids.size() / src_lengths.size(); }
};

/// One decoded output.
struct Hypothesis {
  std::vector<std::int32_t> ids;  ///< tokens, without bos and end token
  double score = 0;               ///< sum of the log-probabilities of ids and, where `finished`, of the end token
  bool finished = false;          ///< ended by an end token, not by a limit
  double value = 0;               ///< what a beam is ranked by: the score after penalties
  std::vector<std::int32_t> alignment;  ///< the source position that each id attends to most; only with `align`
  std::int32_t end_id = -1;             ///< the end token, where `finished`
};

/// A token that a step chose: a candidate of a beam, or a sample.
struct Candidate {
  double value;  ///< sum after the rules, which a beam is ranked by
  double score;  ///< sum of plain log-probabilities
  std::int32_t sentence;  ///< index in the batch
  std::int32_t row;       ///< row of its sentence that it continues
  std::int32_t token;
  std::int32_t rank;  ///< rank among the sentence's candidates, from 0, or the sample's number
};

/// Optional arguments of `decode`.
struct Hooks {
  const Trie* allowed = nullptr;  ///< the only outputs allowed; null: any
  std::function<void(const std::vector<Candidate>&)> on_step;  ///< gets each step's candidates, by sentence
  const std::atomic<bool>* cancel = nullptr;  ///< once true, the next step throws Status::cancelled
  bool strict = true;  ///< stop at NaN or infinite log-probabilities; else those are never chosen
};

/// The outputs of each source, best first, or its samples.
///
/// Throws Error: Status::limit where the options ask for what the engine cannot do, NotNumbers for log-probabilities
/// that are NaN or infinite, Status::engine for tokens that do not exist.
std::vector<std::vector<Hypothesis>> decode(Engine& engine, const Batch& batch, const DecodeOptions& options,
                                            const Hooks& hooks = {});

/// The log-probability of every token of each target, end token included, given those before it. Throws as `decode`.
std::vector<std::vector<double>> score(Engine& engine, const Batch& batch,
                                       const std::vector<std::vector<std::int32_t>>& targets,
                                       const std::atomic<bool>* cancel = nullptr);

/// Throws Error with Status::cancelled once `cancel` is true; null: never.
void stop_if(const std::atomic<bool>* cancel);

}  // namespace tformer
