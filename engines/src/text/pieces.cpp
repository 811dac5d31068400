// sentencepiece tokenizers, with the model's own ids or those of a list of pieces.
#include <sentencepiece_processor.h>

#include <memory>

#include "errors.hpp"
#include "text/kinds.hpp"
#include "text/unicode.hpp"

namespace tformer {
namespace {

constexpr std::string_view space_mark = "\xE2\x96\x81";  // U+2581

void load(sentencepiece::SentencePieceProcessor& processor, const std::string& model) {
  const std::string reason = model.empty() ? "it is empty" : processor.LoadFromSerializedProto(model).ToString();
  if (model.empty() || !processor.status().ok()) {
    throw Error(Status::bundle, "the sentencepiece model is damaged: " + reason);
  }
}

void require(const sentencepiece::util::Status& status) {
  if (!status.ok()) throw Error(Status::text, "sentencepiece: " + status.ToString());
}

class SentencePiece final : public Tokenizer {
 public:
  SentencePiece(const std::string& model, Specials special) : Tokenizer(std::move(special)) {
    load(processor_, model);
    if (processor_.unk_id() != specials.unk) {
      throw Error(Status::bundle, "the sentencepiece model has its unknown token at " +
                                      std::to_string(processor_.unk_id()) + ", not at " +
                                      std::to_string(specials.unk));
    }
  }

  std::int32_t size() const override { return processor_.GetPieceSize(); }

  std::int32_t id_of(const std::string& entry) const override {
    const std::int32_t found = processor_.PieceToId(entry);
    return found != specials.unk || entry == processor_.IdToPiece(found) ? found : -1;
  }

  std::string entry(std::int32_t id) const override { return processor_.IdToPiece(id); }

  Ids encode(std::string_view text) const override {
    Ids ids;
    require(processor_.Encode(text, &ids));
    return ids;
  }

  std::string decode(const Ids& ids) const override {
    Ids shown;
    for (const std::int32_t id : ids) {
      if (id >= 0 && id < size() && !specials.hides(id)) shown.push_back(id);
    }
    std::string text;
    require(processor_.Decode(shown, &text));
    return text;
  }

 private:
  sentencepiece::SentencePieceProcessor processor_;
};

/// The byte that a piece such as `<0xE2>` is, or -1.
int byte_of(std::string_view piece) {
  if (piece.size() != 6 || piece.substr(0, 3) != "<0x" || piece[5] != '>') return -1;
  int byte = 0;
  for (const char c : piece.substr(3, 2)) {
    const bool digit = c >= '0' && c <= '9';
    if (!digit && (c < 'A' || c > 'F')) return -1;
    byte = byte * 16 + (digit ? c - '0' : c - 'A' + 10);
  }
  return byte;
}

class PieceList final : public Tokenizer {
 public:
  PieceList(const std::string& model, std::vector<std::string> entries, Specials special)
      : Tokenizer(std::move(special)), entries_(std::move(entries), specials) {
    load(processor_, model);
  }

  std::int32_t size() const override { return entries_.size(); }
  std::int32_t id_of(const std::string& entry) const override { return entries_.first(entry); }
  std::string entry(std::int32_t id) const override { return entries_.entry(id); }

  Ids encode(std::string_view text) const override {
    std::vector<std::string> pieces;
    require(processor_.Encode(text, &pieces));
    Ids ids;
    ids.reserve(pieces.size());
    for (const std::string& piece : pieces) ids.push_back(entries_.id(piece));
    return ids;
  }

  std::string decode(const Ids& ids) const override {
    std::string bytes;
    for (const std::string_view piece : entries_.shown(ids, specials)) {
      const int byte = byte_of(piece);
      if (byte < 0) bytes += piece;
      else bytes += static_cast<char>(static_cast<unsigned char>(byte));
    }
    std::string text = utf8_replaced(bytes);
    for (std::size_t i = 0; (i = text.find(space_mark, i)) != std::string::npos; ++i) {
      text.replace(i, space_mark.size(), " ");
    }
    const std::size_t first = text.find_first_not_of(' ');
    return first == std::string::npos ? "" : text.substr(first, text.find_last_not_of(' ') + 1 - first);
  }

 private:
  Vocabulary entries_;
  sentencepiece::SentencePieceProcessor processor_;
};

}  // namespace

std::function<std::string(const std::string&)> normalizer_of(const std::string& model) {
  // Behind a model, these fields of its normalizer are false: a prefix, one space for several, U+2581 for a space.
  const std::string raw("\x1A\x06\x18\x00\x20\x00\x28\x00", 8);
  const auto processor = std::make_shared<sentencepiece::SentencePieceProcessor>();
  load(*processor, model + raw);
  return [processor](const std::string& text) {
    std::string made;
    require(processor->Normalize(text, &made));
    return made;
  };
}

std::unique_ptr<Tokenizer> make_sentencepiece(const std::string& model, Specials specials) {
  return std::make_unique<SentencePiece>(model, std::move(specials));
}

std::unique_ptr<Tokenizer> make_pieces(const std::string& model, std::vector<std::string> entries, Specials specials) {
  return std::make_unique<PieceList>(model, std::move(entries), std::move(specials));
}

}  // namespace tformer
