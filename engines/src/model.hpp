// A model that is open: a bundle, what runs it and its tokenizers. Immutable; any number of threads may use one.
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
  OpenModel(const std::string& folder, const Settings& settings);

  const Backend& backend() const { return *backend_; }
  const Tokenizers& tokenizers() const { return tokenizers_; }
  /// The bundle's own decoding options.
  const Json& decoding() const { return decoding_; }
  /// The variant's name, fp32 for the standard graphs; of plans their precision.
  const std::string& variant() const { return variant_; }

 private:
  std::shared_ptr<const Backend> backend_;
  Tokenizers tokenizers_;
  Json decoding_ = Json::object();
  std::string variant_;

  void open_tokenizers(const Bundle& bundle);
};

/// The ids that the encoder sees of a text. Throws Error for what is no text.
Ids source_ids(const OpenModel& model, std::string_view text);
/// What the decoder must produce for a text, end token included. Throws Error for what is no text.
Ids target_ids(const OpenModel& model, std::string_view text);
/// The id of an entry of the target vocabulary. Throws Error where there is none.
std::int32_t target_entry(const OpenModel& model, std::string_view entry);

}  // namespace tformer
