// Lists of likely tokens: which target tokens a sentence may use. The file's layout is in docs/bundle.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tformer {

class Bundle;

/// The lists of a bundle. Immutable.
class Shortlist {
 public:
  /// Throws std::invalid_argument for content that is not as it was written.
  explicit Shortlist(std::string content);

  std::size_t sources() const { return sources_; }
  std::size_t vocab() const { return vocab_; }
  /// SHA-256 of both tokenizers' files, hex.
  const std::string& tokenizers() const { return tokenizers_; }
  /// Mark in `allowed`, of V entries, what a source may use.
  void allow(const std::int32_t* source, std::size_t length, std::uint8_t* allowed) const;

 private:
  std::size_t sources_ = 0, vocab_ = 0;
  std::string tokenizers_;
  std::vector<std::int64_t> offsets_;
  std::vector<std::int32_t> always_, targets_;
};

/// The lists of a bundle, for one of its variants. Throws Error.
Shortlist open_shortlist(const Bundle& bundle, const std::string& variant);

}  // namespace tformer
