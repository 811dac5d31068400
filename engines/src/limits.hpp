// The largest request that an engine accepts, and the checks that refuse larger ones before they reach a device.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tformer {

struct ModelInfo;

/// The sizes that a TensorRT plan is compiled for; smaller requests are padded to them.
struct Profile {
  std::int64_t batch = 0;  ///< sentences
  std::int64_t beams = 0;
  std::int64_t src_len = 0;   ///< source tokens
  std::int64_t capacity = 0;  ///< target positions

  /// Such as 8x4x64x128.
  std::string shown() const;
  /// Whether a request of these sizes fits.
  bool holds(const Profile& wanted) const;
};

/// The largest request that an engine accepts.
struct Limits {
  std::int64_t batch = 0;       ///< sentences
  std::int64_t src_tokens = 0;  ///< source length, end token included
  std::int64_t tgt_tokens = 0;  ///< decoding steps
  std::int64_t beams = 0;       ///< rows per sentence
  std::vector<Profile> profiles = {};  ///< the only combinations of sizes, if not all within the limits; none: all
  std::string hint = "";               ///< how to get a larger limit; empty: by another export

  /// Most sentences per batch, given rows per sentence and lengths; 1 where no profile has these sizes.
  std::size_t sentences(std::int64_t rows, std::size_t src, std::int64_t tgt) const;
  /// Refuse options that no plan has room for; 0: the option was not given. Throws Error.
  void check_asked(std::int64_t max_tokens, std::int64_t wanted_beams) const;
  /// The remedy that a message names: `hint`, or `otherwise` where there is none.
  std::string or_else(const std::string& otherwise) const { return hint.empty() ? otherwise : hint; }
};

/// Refuse what the model cannot take, before it reaches a device. Throws Error.
void check_request(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                   const ModelInfo& model, const Limits& limits);

/// Refuse a step of too many beams or beyond the last position. Throws Error.
void check_step(std::int64_t beams, std::int64_t position, const Limits& limits);

/// Refuse an id outside the target vocabulary. Throws Error.
void check_token(std::int64_t token, std::int32_t tgt_vocab);

template <typename Tokens>
void check_tokens(const Tokens& tokens, std::int32_t tgt_vocab) {
  for (const auto token : tokens) check_token(token, tgt_vocab);
}

}  // namespace tformer
