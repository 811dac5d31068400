// Written by make spec from Python: messages of tformer_deploy/base/messages.py, and constants.
#pragma once

#include <cstdint>
#include <string>

namespace tformer::spec {

/// Log-probability sum of a padding row in a TensorRT step.
constexpr float dead = -1.0e+09F;
/// The best log-probability of a row is above it, unless it is NaN, infinite or overflowed.
constexpr float least = -1.0e+04F;
/// With fewer sentences than this share, caches are copied to smaller buffers.
constexpr double sparse = 0.75;
/// A shortlist is padded to a multiple of it.
constexpr std::int64_t list_unit = 64;
/// Positions of a new cache, which doubles when it is full.
constexpr std::int64_t first_capacity = 32;
/// Wrong predictions after which the GPU no longer runs ahead of a batch's search.
constexpr int most_misses = 4;
/// Padded source tokens of a batch, unless an engine or the user sets it.
constexpr std::int64_t batch_tokens = 4096;
/// Largest width in a model, that of its feed-forward layers.
constexpr std::int64_t most_width = 1048576;
/// Most heads of an attention.
constexpr std::int64_t most_heads = 4096;

inline std::string too_many_sentences(std::int64_t sentences, std::int64_t limit) {
  return "a batch of " + std::to_string(sentences) + " sentences exceeds the limit of " + std::to_string(limit) + ": send fewer at once";
}
inline std::string source_too_long(std::int64_t tokens, std::int64_t limit, const std::string& remedy) {
  return "a source of " + std::to_string(tokens) + " tokens exceeds the limit of " + std::to_string(limit) + ": split it, or " + remedy;
}
constexpr const char* longer_sources = "export a model with a larger src_len axis and max_positions";
inline std::string wrong_lengths(std::int64_t width) {
  return "source lengths must be between 1 and the width " + std::to_string(width) + " of the ids";
}
inline std::string source_id(std::int64_t token, std::int64_t size) {
  return "token id " + std::to_string(token) + " is outside the source vocabulary of " + std::to_string(size);
}
inline std::string target_id(std::int64_t token, std::int64_t size) {
  return "token id " + std::to_string(token) + " is outside the target vocabulary of " + std::to_string(size);
}
inline std::string too_many_beams(std::int64_t beams, std::int64_t limit, const std::string& remedy) {
  return std::to_string(beams) + " beams exceed the limit of " + std::to_string(limit) + ": use fewer, or " + remedy;
}
constexpr const char* larger_beams = "export with a larger beams axis (at most half the vocabulary unless top_k is set)";
inline std::string too_many_steps(std::int64_t step, std::int64_t limit) {
  return "decoding step " + std::to_string(step) + " exceeds the limit of " + std::to_string(limit) + " target tokens";
}
inline std::string too_many_rows(std::int64_t rows, const std::string& kind, std::int64_t limit, const std::string& remedy) {
  return std::to_string(rows) + " " + kind + " exceed the engine's limit of " + std::to_string(limit) + ": use fewer, or " + remedy;
}
constexpr const char* more_rows = "export with a larger beams axis";
inline std::string beyond_plans(const std::string& option, std::int64_t value, std::int64_t limit, const std::string& remedy) {
  return option + " " + std::to_string(value) + " exceeds the plans' largest, " + std::to_string(limit) + ": use less, or " + remedy;
}
constexpr const char* no_attention = "this variant does not return attention: export with a recipe that has attention = true, such as fp32-attention";
constexpr const char* no_memory_graph = "this variant cannot run the encoder alone: export it again with --memory";
inline std::string cannot_join(const std::string& targets) {
  return "this engine cannot add sentences to a running batch: use a variant of target " + targets + ", without a shortlist";
}
inline std::string too_many_joined(std::int64_t sentences, std::int64_t limit) {
  return std::to_string(sentences) + " sentences exceed the limit of " + std::to_string(limit) + ": admit fewer";
}
inline std::string not_finite(std::int64_t step) {
  return "NaN or infinite log-probabilities at token " + std::to_string(step) + ": values overflow, or the weights contain NaN: tformer check names the first layer";
}
inline std::string top_k(std::int64_t top_k, std::int64_t size) {
  return "top_k=" + std::to_string(top_k) + " exceeds the vocabulary of " + std::to_string(size);
}
constexpr const char* end_is_forced = "a forced token is an end token: leave it out, an output ends by itself";
constexpr const char* empty_source = "the source is empty, so that no target can be scored: leave the line out";
constexpr const char* forced_end = " and the forced end";
inline std::string too_many_forced(std::int64_t forced, const std::string& also, std::int64_t longest) {
  return std::to_string(forced) + " forced tokens" + also + " do not fit into " + std::to_string(longest) + ", the most that max_tokens, max_ratio and the model's positions allow here: force fewer, or raise these";
}

}  // namespace tformer::spec
