// Byte-pair encoding: over the bytes of a text (Radford et al. 2019), or over the characters of its words.
#include <algorithm>
#include <array>

#include "text/kinds.hpp"
#include "text/merges.hpp"
#include "text/unicode.hpp"

namespace tformer {
namespace {

/// GPT-2's printable character for each byte: its own if it is printable, else one from U+0100 on.
std::array<char32_t, 256> byte_characters() {
  std::array<char32_t, 256> found{};
  char32_t next = 0x100;
  for (std::size_t byte = 0; byte < found.size(); ++byte) {
    const bool own = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    found[byte] = own ? static_cast<char32_t>(byte) : next++;
  }
  return found;
}

const std::array<char32_t, 256> shown_bytes = byte_characters();

enum class Kind { space, letter, number, other };

Kind kind_of(char32_t c) {
  if (is_white(c)) return Kind::space;
  return is_letter(c) ? Kind::letter : is_number(c) ? Kind::number : Kind::other;
}

/// The end of the GPT-2 word that begins at `start`.
std::size_t word_end(const std::u32string& text, std::size_t start) {
  for (const std::u32string_view contraction : {U"'s", U"'t", U"'re", U"'ve", U"'m", U"'ll", U"'d"}) {
    if (text.compare(start, contraction.size(), contraction) == 0) return start + contraction.size();
  }
  const bool behind_space = text[start] == ' ' && start + 1 < text.size() && kind_of(text[start + 1]) != Kind::space;
  std::size_t end = start + (behind_space ? 1 : 0);
  const Kind kind = kind_of(text[end]);
  while (end < text.size() && kind_of(text[end]) == kind) ++end;
  // The last of several spaces belongs to the next word.
  return end - (kind == Kind::space && end < text.size() && end - start > 1 ? 1 : 0);
}

/// The bytes that an entry shows; one that has another character is text as it is.
std::string bytes_of(std::string_view entry) {
  std::string bytes;
  for (const char32_t c : characters(entry)) {
    const auto found = std::find(shown_bytes.begin(), shown_bytes.end(), c);
    if (found == shown_bytes.end()) return std::string(entry);
    bytes += static_cast<char>(static_cast<unsigned char>(found - shown_bytes.begin()));
  }
  return bytes;
}

class ByteBpe final : public Tokenizer {
 public:
  ByteBpe(BpeFile file, Specials special, bool space)
      : Tokenizer(std::move(special)),
        entries_(std::move(file.entries), specials),
        merges_(file.merges),
        space_(space) {}

  std::int32_t size() const override { return entries_.size(); }
  std::int32_t id_of(const std::string& entry) const override { return entries_.first(entry); }
  std::string entry(std::int32_t id) const override { return entries_.entry(id); }

  Ids encode(std::string_view line) const override {
    std::u32string text = characters(line);
    if (space_ && !text.empty() && text[0] != U' ') text.insert(text.begin(), U' ');
    Ids ids;
    std::string word;
    std::vector<std::size_t> ends;
    for (std::size_t start = 0; start < text.size();) {
      const std::size_t end = word_end(text, start);
      word.clear();
      ends.clear();
      for (const char byte : utf8(std::u32string_view(text).substr(start, end - start))) {
        append_utf8(word, shown_bytes[static_cast<unsigned char>(byte)]);
        ends.push_back(word.size());
      }
      for (const std::string_view symbol : merges_.merge(word, ends)) ids.push_back(entries_.id(std::string(symbol)));
      start = end;
    }
    return ids;
  }

  std::string decode(const Ids& ids) const override {
    std::string bytes;
    for (const std::string_view entry : entries_.shown(ids, specials)) bytes += bytes_of(entry);
    std::string text = utf8_replaced(bytes);
    if (space_ && text.compare(0, 1, " ") == 0) text.erase(0, 1);
    return text;
  }

 private:
  Vocabulary entries_;
  Merges merges_;
  bool space_;
};

class WordBpe final : public Tokenizer {
 public:
  WordBpe(BpeFile file, Specials special, std::string inner, std::string final)
      : Tokenizer(std::move(special)),
        entries_(std::move(file.entries), specials),
        merges_(file.merges),
        inner_(std::move(inner)),
        final_(std::move(final)) {}

  std::int32_t size() const override { return entries_.size(); }
  std::int32_t id_of(const std::string& entry) const override { return entries_.first(entry); }
  std::string entry(std::int32_t id) const override { return entries_.entry(id); }

  Ids encode(std::string_view text) const override {
    constexpr std::string_view end_of_word = "</w>";
    Ids ids;
    for (const std::string_view found : split(text)) {
      std::string word;
      std::vector<std::size_t> ends;
      for (const char32_t c : characters(found)) {
        append_utf8(word, c);
        ends.push_back(word.size());
      }
      word += end_of_word;
      ends.back() = word.size();
      std::vector<std::string_view> symbols = merges_.merge(word, ends);
      symbols.back().remove_suffix(end_of_word.size());
      for (const std::string_view& symbol : symbols) {
        ids.push_back(entries_.id(std::string(symbol) + (&symbol == &symbols.back() ? final_ : inner_)));
      }
    }
    return ids;
  }

  std::string decode(const Ids& ids) const override {
    std::string text;
    const std::string between = final_.empty() ? " " : "";
    bool first = true;
    for (const std::string_view entry : entries_.shown(ids, specials)) {
      text += first ? "" : between;
      text += entry;
      first = false;
    }
    if (!final_.empty()) return std::string(stripped(replaced(text, final_, " ")));
    text = replaced(text, inner_ + " ", "");
    if (text.size() >= inner_.size() && text.compare(text.size() - inner_.size(), inner_.size(), inner_) == 0) {
      text.erase(text.size() - inner_.size());
    }
    return text;
  }

 private:
  Vocabulary entries_;
  Merges merges_;
  std::string inner_, final_;
};

}  // namespace

std::unique_ptr<Tokenizer> make_byte_bpe(BpeFile file, Specials specials, bool space) {
  return std::make_unique<ByteBpe>(std::move(file), std::move(specials), space);
}

std::unique_ptr<Tokenizer> make_word_bpe(BpeFile file, Specials specials, std::string inner, std::string final) {
  return std::make_unique<WordBpe>(std::move(file), std::move(specials), std::move(inner), std::move(final));
}

}  // namespace tformer
