// Text to ids and back. What each kind does is in docs/bundle.md, section "Text".
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace tformer {

using Ids = std::vector<std::int32_t>;

/// Ids of a vocabulary's special tokens; the defaults are those of descriptions that name none.
struct Specials {
  std::int32_t pad = 1;  ///< -1: there is none; of `bos` too
  std::int32_t bos = 2;
  std::int32_t eos = 3;
  std::int32_t unk = 0;
  Ids others;  ///< more that no text gives and that are not shown in text

  /// Whether text never gives this id, but for `unk`.
  bool contains(std::int32_t id) const;
  /// Whether it stands for no text.
  bool hides(std::int32_t id) const;
};

/// Text of one language to ids without special tokens, and back. Any number of threads may use one.
class Tokenizer {
 public:
  explicit Tokenizer(Specials special) : specials(std::move(special)) {}
  virtual ~Tokenizer() = default;
  /// Entries of the vocabulary.
  virtual std::int32_t size() const = 0;
  /// Ids of a line of valid UTF-8. Throws Error where C++ cannot split text of this kind.
  virtual Ids encode(std::string_view text) const = 0;
  /// The line of some ids; special tokens and ids that do not exist are left out.
  virtual std::string decode(const Ids& ids) const = 0;
  /// The id of an entry of the vocabulary, special ones too; -1: there is no such entry.
  virtual std::int32_t id_of(const std::string& entry) const = 0;
  /// The entry of an id that exists.
  virtual std::string entry(std::int32_t id) const = 0;
  /// How many bytes of the line of some ids do not change when more follow.
  virtual std::size_t settled(const std::string& line) const { return line.size(); }

  const Specials specials;
};

/// Entries with the id that text gives them.
class Vocabulary {
 public:
  /// Throws Error where there are too few entries for the special ids.
  Vocabulary(std::vector<std::string> entries, const Specials& specials);
  std::int32_t size() const { return static_cast<std::int32_t>(entries_.size()); }
  const std::string& entry(std::int32_t id) const { return entries_[static_cast<std::size_t>(id)]; }
  /// `unk` for what is no entry, and for special ones; of equal entries the last.
  std::int32_t id(const std::string& entry) const;
  /// The first entry that is the same, special or not; -1: none is.
  std::int32_t first(const std::string& entry) const;
  /// The entries of those ids that exist and are not hidden.
  std::vector<std::string_view> shown(const Ids& ids, const Specials& specials) const;

 private:
  std::vector<std::string> entries_;
  std::unordered_map<std::string, std::int32_t> ids_;
  std::int32_t unk_;
};

/// A model's text on both sides; the one place where special tokens are added and removed.
struct Tokenizers {
  std::shared_ptr<const Tokenizer> source, target;
  Ids prefix;  ///< what every source begins with, such as a language's code
  Ids suffix;  ///< what every source ends with

  /// What the encoder sees of a line.
  Ids source_ids(std::string_view text) const;
  /// What the decoder must produce: the line's ids and eos.
  Ids target_ids(std::string_view text) const;
};

/// The tokenizer that a description of one side names. Throws Error.
std::shared_ptr<const Tokenizer> make_tokenizer(const nlohmann::json& description, const std::filesystem::path& folder);

/// Both sides, by the manifest's `tokenizer`. Throws Error.
Tokenizers make_tokenizers(const nlohmann::json& description, const std::filesystem::path& folder);

}  // namespace tformer
