// Decoding options. docs/decoding.md has the exact meaning of every field.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tformer {

/// Greedy search unless `beams` is above 1 or `sampling` is set. What each option is: options.inc, docs/decoding.md.
struct DecodeOptions {
#define TFORMER_OPTION(type, name, value, of, choices, bounds, rule, kind, help) type name = value;
#include "decode/options.inc"
#undef TFORMER_OPTION

  /// Throws Error for values out of range or that contradict each other.
  void check() const;

  /// The tokens that end an output of a model with that end token.
  std::vector<std::int32_t> ends(std::int32_t eos_id) const;
  /// Rows per sentence on the device.
  std::int64_t rows() const { return sampling ? n_best : beams; }
  /// Whether the search reads attention weights.
  bool attention() const { return align || coverage_penalty > 0; }
  /// Whether the search reads only the best token of each step.
  bool greedy() const { return beams == 1 && !sampling && stop == "count" && patience < 1.5; }
};

/// Options by their names, checked. Throws Error for names, types and values that do not exist.
DecodeOptions options_of(const nlohmann::json& values);

/// Ids in 32 bits; those out of range become other invalid ids.
std::vector<std::int32_t> token_ids(const std::vector<std::int64_t>& ids);

/// The names of all decoding options.
std::vector<std::string> option_names();

/// An option for who shows or checks it.
struct OptionInfo {
  std::string name;
  std::string kind;    ///< int, float, bool, choice, token ids, sequences of token ids
  std::string value;   ///< the default, as `option_value` takes it
  std::string values;  ///< which are valid, in words, choices with commas between; empty: any
  std::string help;
  double least = 0, most = 0;  ///< numbers between which valid ones lie; 0 and 0: it is no number
};

/// All decoding options, whose defaults are these.
std::vector<OptionInfo> options_about(const DecodeOptions& defaults);

/// A value as it is written on a command line, of the type that the option has. Throws Error.
nlohmann::json option_value(const std::string& name, const std::string& text);

/// The options that were given, and a model's defaults for the others. Defaults for beams do not hold for sampling,
/// nor for a beam of 1. Throws Error.
DecodeOptions over_defaults(const nlohmann::json& defaults, const nlohmann::json& asked);

}  // namespace tformer
