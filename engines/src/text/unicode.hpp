// UTF-8, and properties of characters as in Python's str: white space, letters, numbers, lower case.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tformer {

/// Why a text is not UTF-8, in Python's words; empty: it is.
std::string_view utf8_problem(std::string_view text);

/// The text with U+FFFD for each part that is not UTF-8, as Python's `decode("utf-8", "replace")`.
std::string utf8_replaced(std::string_view bytes);

/// The same as one line: without control characters, which terminals obey and damaged files may contain.
std::string one_line(std::string_view bytes);

/// The characters of valid UTF-8.
std::u32string characters(std::string_view text);

/// Append a character as UTF-8.
void append_utf8(std::string& text, char32_t character);
std::string utf8(std::u32string_view text);

/// What Unicode calls white space, and U+001C to U+001F.
bool is_space(char32_t character);
/// The same without U+001C to U+001F, as Unicode has it.
bool is_white(char32_t character);
bool is_letter(char32_t character);
bool is_number(char32_t character);
/// `\w` of regular expressions, as Unicode's TR 18 has it.
bool is_word(char32_t character);

/// Lower case with the final sigma, as Python's `str.lower`.
std::string lower(std::string_view text);

/// A text without white space at both ends.
std::string_view stripped(std::string_view text);

/// A text with `by` for each `old`, which is not empty.
std::string replaced(std::string_view text, std::string_view old, std::string_view by);

/// The words between white space.
std::vector<std::string_view> split(std::string_view text);

}  // namespace tformer
