// What an engine takes, and the words in which the rest is refused. Mirrors tformer_deploy/engines/base.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tformer {

struct ModelInfo;

/// The sizes that a plan is compiled for; a request that is smaller is filled up.
struct Profile {
  std::int64_t batch = 0;  ///< sentences
  std::int64_t beams = 0;
  std::int64_t src_len = 0;   ///< source tokens
  std::int64_t capacity = 0;  ///< target positions

  /// Such as 8x4x64x128.
  std::string shown() const;
  /// Whether a request of other sizes has room.
  bool holds(const Profile& wanted) const;
};

/// The largest request that an engine takes.
struct Limits {
  std::int64_t batch = 0;       ///< sentences
  std::int64_t src_tokens = 0;  ///< source length, end token included
  std::int64_t tgt_tokens = 0;  ///< decoding steps
  std::int64_t beams = 0;       ///< rows of a sentence
  std::vector<Profile> profiles = {};  ///< the only combinations of sizes, where not every one within these is possible
  std::string hint = "";               ///< how to get a larger limit, where that is not by another export

  /// Most sentences of a batch with that many rows each, that long; 1 where there are no such sizes at all.
  std::size_t sentences(std::int64_t rows, std::size_t src, std::int64_t tgt) const;
  /// Refuse what somebody asked for, 0: nothing, and no plan has room for. Throws Error.
  void check_asked(std::int64_t max_tokens, std::int64_t wanted_beams) const;
  /// The end of a message about a limit: `hint`, or what helps where there is none.
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
