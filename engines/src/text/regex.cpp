#include "text/regex.hpp"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <array>
#include <cctype>

#include "errors.hpp"

namespace tformer {
namespace {

/// Rewrite for PCRE2: `{,n}` as `{0,n}`, which PCRE2 before 10.43 takes literally, and `[` in a class as `\[`.
std::string for_pcre2(const std::string& expression) {
  std::string made;
  bool in_class = false;
  for (std::size_t i = 0; i < expression.size(); ++i) {
    const char c = expression[i];
    made += c;
    if (c == '\\' && i + 1 < expression.size()) {
      made += expression[++i];
    } else if (c == '[' && !in_class) {
      in_class = true;
      // A bracket in first place does not end the class.
      if (expression.compare(i + 1, 1, "^") == 0) made += expression[++i];
      if (expression.compare(i + 1, 1, "]") == 0) made += expression[++i];
    } else if (c == '[') {  // inside a class, PCRE2 reads [:alpha:] as a POSIX class
      made.insert(made.size() - 1, "\\");
    } else if (c == ']') {
      in_class = false;
    } else if (c == '{' && !in_class && expression.compare(i + 1, 1, ",") == 0) {
      std::size_t end = i + 2;
      while (end < expression.size() && std::isdigit(static_cast<unsigned char>(expression[end]))) ++end;
      if (end < expression.size() && expression[end] == '}') made += '0';
    }
  }
  return made;
}

std::string message_of(int code) {
  std::array<PCRE2_UCHAR, 256> text{};
  pcre2_get_error_message(code, text.data(), text.size());
  return reinterpret_cast<const char*>(text.data());
}

}  // namespace

struct Regex::Compiled {
  std::string expression;
  pcre2_code* code = nullptr;
  ~Compiled() { pcre2_code_free(code); }
};

Regex::Regex(const std::string& expression) : compiled_(std::make_unique<Compiled>()) {
  compiled_->expression = expression;
  const std::string read = for_pcre2(expression);
  int problem = 0;
  PCRE2_SIZE where = 0;
  compiled_->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(read.data()), read.size(),
                                  PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C, &problem, &where, nullptr);
  if (!compiled_->code) {
    throw Error(Status::bundle, "regular expression '" + expression.substr(0, 80) + "': " + message_of(problem));
  }
}

Regex::~Regex() = default;

std::size_t Regex::groups() const {
  std::uint32_t count = 0;
  pcre2_pattern_info(compiled_->code, PCRE2_INFO_CAPTURECOUNT, &count);
  return count;
}

std::vector<std::string_view> Regex::find_all(std::string_view text) const {
  std::vector<std::string_view> found;
  const std::unique_ptr<pcre2_match_data, void (*)(pcre2_match_data*)> match(pcre2_match_data_create(1, nullptr),
                                                                             pcre2_match_data_free);
  if (!match) throw std::bad_alloc();
  PCRE2_SIZE start = 0;
  std::uint32_t options = 0;
  while (true) {
    const int count = pcre2_match(compiled_->code, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), start,
                                  options, match.get(), nullptr);
    if (count == PCRE2_ERROR_NOMATCH) return found;
    if (count < 0) {
      throw Error(Status::text, "regular expression '" + compiled_->expression.substr(0, 80) +
                                    "' cannot split the line: " + message_of(count) + "; split the line");
    }
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(match.get());
    found.push_back(text.substr(ends[0], ends[1] - ends[0]));
    // After an empty match, do not match it again.
    options = PCRE2_NO_UTF_CHECK | (ends[0] == ends[1] ? PCRE2_NOTEMPTY_ATSTART : 0U);
    start = ends[1];
  }
}

std::unique_ptr<const Regex> word_expression(const std::string& expression) {
  // Constructs that other languages lack or read differently, after escapes that all of them have.
  static const Regex only_here(R"((?:\\[dwsDWS]|\\[^\w\s\p{L}\p{N}\p{Z}])(*SKIP)(*FAIL))"
                               R"(|\((?:\*|\?(?![:=!]))|\\.|\[\[|&&|\|\||~~|[*+?}]\+)");
  const auto refuse = [&expression](const std::string& why) {
    throw Error(Status::bundle, "regular expression '" + expression.substr(0, 80) + "'" + why);
  };
  if (const auto found = only_here.find_all(expression); !found.empty()) {
    refuse(": '" + std::string(found[0]) + "' is not the same in every language: rewrite it");
  }
  auto made = std::make_unique<const Regex>(expression);
  if (made->groups()) refuse(": write groups as (?:...)");
  if (!made->find_all("").empty()) refuse(" matches nothing at all: have it match characters");
  return made;
}

}  // namespace tformer
