// An open model: a bundle, its backend and its tokenizers. Immutable, so any number of threads may share one.
#pragma once

#include <memory>
#include <string>

#include "backend.hpp"
#include "settings.hpp"
#include "text/tokenizer.hpp"

namespace tformer {

class OpenModel {
 public:
  /// Throws Error.
  OpenModel(const Folder& folder, const Settings& settings);

  const Backend& backend() const { return *backend_; }
  const Tokenizers& tokenizers() const { return tokenizers_; }
  /// The bundle's own decoding options.
  const Json& decoding() const { return decoding_; }
  /// The variant's name, fp32 for the standard graphs; for plans their precision.
  const std::string& variant() const { return variant_; }

 private:
  std::shared_ptr<const Backend> backend_;
  Tokenizers tokenizers_;
  Json decoding_ = Json::object();
  std::string variant_;

  void open_tokenizers(const Bundle& bundle);
};

/// The token ids that the encoder gets for a text. Throws Error for invalid UTF-8.
Ids source_ids(const OpenModel& model, std::string_view text);
/// The token ids that the decoder must produce for a text, end token included. Throws Error for invalid UTF-8.
Ids target_ids(const OpenModel& model, std::string_view text);
/// The id of an entry of the target vocabulary. Throws Error where there is none.
std::int32_t target_entry(const OpenModel& model, std::string_view entry);

}  // namespace tformer
