#include "text/unicode.hpp"

#include <algorithm>
#include <cstddef>
#include <iterator>

namespace tformer {
namespace {

struct Range {
  char32_t first, last;
};

struct Lower {
  char32_t first, last, step;
  std::int32_t difference;
};

namespace tables {
#include "text/unicode_tables.inc"
}  // namespace tables

template <typename Row, std::size_t size>
const Row* find(const Row (&rows)[size], char32_t c) {
  const Row* row = std::upper_bound(rows, rows + size, c, [](char32_t a, const Row& b) { return a < b.first; });
  return row != rows && c <= std::prev(row)->last ? std::prev(row) : nullptr;
}

/// The character that a text begins with, or the error.
struct Sequence {
  std::size_t size;           ///< bytes of the character, or of its largest valid part
  char32_t character;
  std::string_view problem;  ///< empty: it is a character
};

unsigned byte_at(std::string_view text, std::size_t i) { return static_cast<unsigned char>(text[i]); }

Sequence first_sequence(std::string_view text) {
  const unsigned lead = byte_at(text, 0);
  if (lead < 0x80) return {1, lead, {}};
  const std::size_t size = lead < 0xC2 ? 0 : lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : lead < 0xF5 ? 4 : 0;
  if (!size) return {1, 0, "invalid start byte"};
  char32_t character = lead & (0xFFU >> (size + 1));
  for (std::size_t i = 1; i < size; ++i) {
    if (i == text.size()) return {i, 0, "unexpected end of data"};
    const unsigned byte = byte_at(text, i);
    // No overlong forms, no surrogates, nothing above U+10FFFF.
    const unsigned least = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
    const unsigned most = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
    if (byte < least || byte > most) return {i, 0, "invalid continuation byte"};
    character = (character << 6) | (byte & 0x3F);
  }
  return {size, character, {}};
}

bool is_final_sigma(std::u32string_view text, std::size_t i) {
  std::size_t before = i;
  while (before > 0 && find(tables::ignorable, text[before - 1])) --before;
  if (before == 0 || !find(tables::cased, text[before - 1])) return false;
  std::size_t behind = i + 1;
  while (behind < text.size() && find(tables::ignorable, text[behind])) ++behind;
  return behind == text.size() || !find(tables::cased, text[behind]);
}

std::size_t space_at(std::string_view text, std::size_t i) {
  const unsigned lead = byte_at(text, i);
  if (lead < 0x80) return is_space(lead) ? 1 : 0;
  const Sequence found = first_sequence(text.substr(i));
  return found.problem.empty() && is_space(found.character) ? found.size : 0;
}

}  // namespace

std::string_view utf8_problem(std::string_view text) {
  while (!text.empty()) {
    const Sequence found = first_sequence(text);
    if (!found.problem.empty()) return found.problem;
    text.remove_prefix(found.size);
  }
  return {};
}

std::string utf8_replaced(std::string_view bytes) {
  std::string text;
  while (!bytes.empty()) {
    const Sequence found = first_sequence(bytes);
    text += found.problem.empty() ? bytes.substr(0, found.size) : std::string_view("\xEF\xBF\xBD");
    bytes.remove_prefix(found.size);
  }
  return text;
}

std::string one_line(std::string_view bytes) {
  std::string text = utf8_replaced(bytes);
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x20 || byte == 0x7F) text[i] = ' ';
    const bool pair = byte == 0xC2 && i + 1 < text.size();  // U+0080 to U+009F, which terminals obey too
    if (pair && static_cast<unsigned char>(text[i + 1]) < 0xA0) text.replace(i, 2, " ");
  }
  return text;
}

std::u32string characters(std::string_view text) {
  std::u32string found;
  found.reserve(text.size());
  while (!text.empty()) {
    const Sequence next = first_sequence(text);
    found += next.problem.empty() ? next.character : U'\uFFFD';
    text.remove_prefix(next.size);
  }
  return found;
}

void append_utf8(std::string& text, char32_t c) {
  const auto add = [&text](char32_t byte) { text += static_cast<char>(static_cast<unsigned char>(byte)); };
  if (c < 0x80) return add(c);
  if (c < 0x800) {
    add(0xC0 | (c >> 6));
  } else if (c < 0x10000) {
    add(0xE0 | (c >> 12));
    add(0x80 | ((c >> 6) & 0x3F));
  } else {
    add(0xF0 | (c >> 18));
    add(0x80 | ((c >> 12) & 0x3F));
    add(0x80 | ((c >> 6) & 0x3F));
  }
  add(0x80 | (c & 0x3F));
}

std::string utf8(std::u32string_view text) {
  std::string made;
  for (const char32_t c : text) append_utf8(made, c);
  return made;
}

bool is_space(char32_t c) {
  return c == ' ' || (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x1F) || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_letter(char32_t c) { return find(tables::letters, c); }

bool is_number(char32_t c) { return find(tables::numbers, c); }

bool is_word(char32_t c) { return find(tables::words, c); }

bool is_white(char32_t c) { return is_space(c) && !(c >= 0x1C && c <= 0x1F); }

std::string lower(std::string_view text) {
  const std::u32string from = characters(text);
  std::string made;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const char32_t c = from[i];
    const Lower* row = find(tables::lowers, c);
    if (c == 0x130) {
      made += "i\xCC\x87";  // the only character that becomes two
    } else if (c == 0x3A3 && is_final_sigma(from, i)) {
      append_utf8(made, 0x3C2);
    } else if (row && (c - row->first) % row->step == 0) {
      append_utf8(made, static_cast<char32_t>(static_cast<std::int32_t>(c) + row->difference));
    } else {
      append_utf8(made, c);
    }
  }
  return made;
}

std::string_view stripped(std::string_view text) {
  while (!text.empty()) {
    const std::size_t size = space_at(text, 0);
    if (!size) break;
    text.remove_prefix(size);
  }
  while (!text.empty()) {
    std::size_t last = text.size() - 1;
    while (last > 0 && (byte_at(text, last) & 0xC0) == 0x80) --last;
    if (space_at(text, last) != text.size() - last) break;
    text.remove_suffix(text.size() - last);
  }
  return text;
}

std::string replaced(std::string_view text, std::string_view old, std::string_view by) {
  std::string made;
  std::size_t start = 0;
  for (std::size_t i; (i = text.find(old, start)) != std::string::npos; start = i + old.size()) {
    made.append(text, start, i - start).append(by);
  }
  return made.append(text, start, std::string::npos);
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> words;
  std::size_t start = 0, i = 0;
  while (i < text.size()) {
    const std::size_t size = space_at(text, i);
    if (size && i > start) words.push_back(text.substr(start, i - start));
    if (size) start = i + size;
    i += size ? size : first_sequence(text.substr(i)).size;
  }
  if (start < text.size()) words.push_back(text.substr(start));
  return words;
}

}  // namespace tformer
