// The interface of tokenizers, text to ids and back. docs/bundle.md, section "Text", specifies each kind.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bundle/source.hpp"

namespace tformer {

using Ids = std::vector<std::int32_t>;

/// Ids of a vocabulary's special tokens; the defaults are those of vocabularies that tformer learned.
struct Specials {
  std::int32_t pad = 1;  ///< -1: none; likewise `bos`
  std::int32_t bos = 2;
  std::int32_t eos = 3;
  std::int32_t unk = 0;
  Ids others;  ///< further ids that text never produces and that are not shown

  /// Whether text never produces this id, except for `unk`.
  bool contains(std::int32_t id) const;
  /// Whether the id is not shown in text.
  bool hides(std::int32_t id) const;
};

/// Converts text of one language to ids without special tokens, and back. Thread-safe.
class Tokenizer {
 public:
  explicit Tokenizer(Specials special) : specials(std::move(special)) {}
  virtual ~Tokenizer() = default;
  /// Size of the vocabulary.
  virtual std::int32_t size() const = 0;
  /// Ids of a line of valid UTF-8. Throws Error where C++ cannot split text of this kind.
  virtual Ids encode(std::string_view text) const = 0;
  /// Text of ids, without special tokens and ids that do not exist.
  virtual std::string decode(const Ids& ids) const = 0;
  /// Id of a vocabulary entry, special ones included; -1: there is no such entry.
  virtual std::int32_t id_of(const std::string& entry) const = 0;
  /// The entry of an id that exists.
  virtual std::string entry(std::int32_t id) const = 0;
  /// How many bytes of the ids' text cannot change when more ids follow.
  virtual std::size_t settled(const std::string& line) const { return line.size(); }

  const Specials specials;
};

/// A list of entries, and the id of each.
class Vocabulary {
 public:
  /// Throws Error where a special id is beyond the list.
  Vocabulary(std::vector<std::string> entries, const Specials& specials);
  std::int32_t size() const { return static_cast<std::int32_t>(entries_.size()); }
  const std::string& entry(std::int32_t id) const { return entries_[static_cast<std::size_t>(id)]; }
  /// The id that text produces for an entry: `unk` for others and for special ones; the last of equal entries.
  std::int32_t id(const std::string& entry) const;
  /// The id of the first such entry, special or not; -1: there is none.
  std::int32_t first(const std::string& entry) const;
  /// The entries of those ids that exist and are not hidden.
  std::vector<std::string_view> shown(const Ids& ids, const Specials& specials) const;

 private:
  std::vector<std::string> entries_;
  std::unordered_map<std::string, std::int32_t> ids_;
  std::int32_t unk_;
};

/// Tokenizers of source and target; the only place where special tokens are added and removed.
struct Tokenizers {
  std::shared_ptr<const Tokenizer> source, target;
  Ids prefix;  ///< ids that every source begins with, such as a language code
  Ids suffix;  ///< ids that every source ends with

  /// Input of the encoder for a line.
  Ids source_ids(std::string_view text) const;
  /// Target of the decoder: the line's ids and eos.
  Ids target_ids(std::string_view text) const;
  /// The part of the text of output ids that further ids cannot change, so without an incomplete UTF-8 character.
  std::string settled_text(const Ids& ids) const;
};

/// Make a tokenizer by its description. Throws Error.
std::shared_ptr<const Tokenizer> make_tokenizer(const nlohmann::json& description, const Folder& folder);

/// Make both tokenizers by the manifest's `tokenizer`. Throws Error.
Tokenizers make_tokenizers(const nlohmann::json& description, const Folder& folder);

}  // namespace tformer
