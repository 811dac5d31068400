// How to decode. docs/decoding.md has the exact meaning of every field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tformer {

/// Greedy search unless `beams` is above 1 or `sampling` is set. Same names and defaults as Python's DecodeOptions.
struct DecodeOptions {
  std::int64_t max_tokens = 256;  ///< longest output, end token included
  std::int64_t min_tokens = 0;    ///< shortest output, end token included
  double max_ratio = 0.0;         ///< longest output per source token; 0: no such limit
  double min_ratio = 0.0;         ///< shortest output per source token
  std::int64_t n_best = 1;        ///< outputs per source: the best of a beam, or independent samples

  std::int64_t beams = 1;             ///< hypotheses that are kept per sentence
  std::string length_norm = "power";  ///< or "gnmt"
  double length_penalty = 1.0;
  double coverage_penalty = 0.0;  ///< needs a graph that returns attention
  std::string stop = "count";     ///< or "estimate", "exact"
  double patience = 1.0;

  bool sampling = false;  ///< draw tokens instead of searching
  double temperature = 1.0;
  std::int64_t top_k = 0;  ///< draw from the k best tokens; 0: from all
  double top_p = 1.0;
  double min_p = 0.0;
  std::int64_t seed = 0;

  double repetition_penalty = 1.0;
  std::int64_t no_repeat_ngram = 0;  ///< no n-gram of this size twice; 0: no such rule
  // Token ids as given: a search refuses those that are outside the vocabulary.
  std::vector<std::int64_t> suppress;   ///< are never produced
  std::vector<std::int64_t> end_ids;    ///< end an output; none: the model's eos
  bool endless = false;                 ///< no token ends an output
  std::vector<std::int64_t> first_ids;  ///< what every output begins with
  bool first_adds_zero = false;
  bool forced_end = false;
  bool align = false;  ///< report the source position of every token; needs attention

  /// Throws Error for values that make no sense, alone or together.
  void check() const;

  /// The tokens that end an output of a model with that end token.
  std::vector<std::int32_t> ends(std::int32_t eos_id) const;
  /// Rows that a sentence takes on the device.
  std::int64_t rows() const { return sampling ? n_best : beams; }
  /// Whether the search reads attention weights.
  bool attention() const { return align || coverage_penalty > 0; }
  /// Whether one best token a step is all that the search reads.
  bool greedy() const { return beams == 1 && !sampling && stop == "count" && patience < 1.5; }
};

/// Options by their names, checked. Throws Error for names, types and values that do not exist.
DecodeOptions options_of(const nlohmann::json& values);

/// Ids as the model has them; what no vocabulary has stays so.
std::vector<std::int32_t> token_ids(const std::vector<std::int64_t>& ids);

/// What every decoding option is called.
std::vector<std::string> option_names();

/// A value as it is written on a command line, of the type that the option has. Throws Error.
nlohmann::json option_value(const std::string& name, const std::string& text);

/// The options that are asked for, and a model's defaults for the others. Defaults of a beam do not hold for sampling,
/// nor for a beam of 1. Throws Error.
DecodeOptions over_defaults(const nlohmann::json& defaults, const nlohmann::json& asked);

}  // namespace tformer
