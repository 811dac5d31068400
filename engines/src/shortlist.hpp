// Lists of likely tokens: which target tokens a sentence may use. The file's layout is in docs/bundle.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tformer {

class Bundle;

/// What a file of lists holds.
struct ShortlistParts {
  std::size_t sources = 0, vocab = 0;
  std::string tokenizers;              ///< SHA-256 of both tokenizers' files, hex
  std::vector<std::int64_t> offsets;   ///< where the tokens of each source token begin, and the last ones end
  std::vector<std::int32_t> always, targets;
};

/// Of a file `shortlist-HASH.bin`. Throws std::invalid_argument.
ShortlistParts unpacked(const std::string& content);

/// The lists of a bundle. Immutable.
class Shortlist {
 public:
  /// Throws std::invalid_argument for parts that do not fit each other.
  explicit Shortlist(ShortlistParts parts);

  const ShortlistParts& parts() const { return parts_; }
  /// Mark in `allowed`, of V entries, what a source may use.
  void allow(const std::int32_t* source, std::size_t length, std::uint8_t* allowed) const;

 private:
  ShortlistParts parts_;
};

/// What the sentences of a batch may use.
struct Lists {
  std::vector<std::int32_t> ids;                 ///< what any of them may, in order
  std::vector<std::vector<std::int32_t>> places; ///< of each sentence: which of `ids` it may use, in order
};

/// Of sources (B, S); `required`: of some, tokens that they may use as well.
Lists lists_of(const Shortlist& shortlist, const std::vector<std::int32_t>& src_ids,
               const std::vector<std::int32_t>& lengths, const std::vector<std::vector<std::int32_t>>& required);

/// The lists of a bundle, for one of its variants. Throws Error.
Shortlist open_shortlist(const Bundle& bundle, const std::string& variant);

}  // namespace tformer
