// Vocabulary shortlists: the target tokens that are likely for each source token. docs/bundle.md has the file's layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tformer {

class Bundle;

/// The content of a shortlist file.
struct ShortlistParts {
  std::size_t sources = 0, vocab = 0;
  std::string tokenizers;              ///< SHA-256 of both tokenizers' files, hex
  std::vector<std::int64_t> offsets;   ///< where each source token's list begins, and the end of the last
  std::vector<std::int32_t> always, targets;
};

/// Parse a file `shortlist-HASH.bin`. Throws std::invalid_argument.
ShortlistParts unpacked(const std::string& content);

/// The shortlist of a bundle. Immutable.
class Shortlist {
 public:
  /// Throws std::invalid_argument for inconsistent parts.
  explicit Shortlist(ShortlistParts parts);

  const ShortlistParts& parts() const { return parts_; }
  /// Mark in `allowed` (V) the target tokens that a source may use.
  void allow(const std::int32_t* source, std::size_t length, std::uint8_t* allowed) const;

 private:
  ShortlistParts parts_;
};

/// The target tokens that the sentences of a batch may use.
struct Lists {
  std::vector<std::int32_t> ids;                 ///< the union over the batch, in order
  std::vector<std::vector<std::int32_t>> places; ///< for each sentence, its indices into `ids`, in order
};

/// The tokens for sources (B, S); `required`: further tokens of each source, may be shorter than the batch.
Lists lists_of(const Shortlist& shortlist, const std::vector<std::int32_t>& src_ids,
               const std::vector<std::int32_t>& lengths, const std::vector<std::vector<std::int32_t>>& required);

/// Open a bundle's shortlist for one of its variants. Throws Error.
Shortlist open_shortlist(const Bundle& bundle, const std::string& variant);

}  // namespace tformer
