// Regular expressions in the dialect of docs/bundle.md, which every language reads alike.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tformer {

/// A compiled expression over characters; `\d`, `\w` and `\s` are ASCII only. Thread-safe.
class Regex {
 public:
  /// Throws Error for an invalid expression.
  explicit Regex(const std::string& expression);
  ~Regex();
  /// Every match in valid UTF-8, from the left, as Python's `findall`. Throws Error where matching takes too long.
  std::vector<std::string_view> find_all(std::string_view text) const;
  /// How many groups it captures.
  std::size_t groups() const;

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

/// An expression that splits text into words. Throws Error as `Regex` does, and for what is outside the dialect,
/// groups that capture, and an expression that matches "".
std::unique_ptr<const Regex> word_expression(const std::string& expression);

}  // namespace tformer
