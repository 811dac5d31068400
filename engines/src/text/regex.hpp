// Regular expressions of the dialect that docs/bundle.md has: what Python, and other languages, read alike.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tformer {

/// A compiled expression over characters; `\d`, `\w` and `\s` are ASCII's. Any number of threads may use one.
class Regex {
 public:
  /// Throws Error for what is no expression.
  explicit Regex(const std::string& expression);
  ~Regex();
  /// Every match in valid UTF-8, from the left, as Python's `findall`. Throws Error where matching takes too long.
  std::vector<std::string_view> find_all(std::string_view text) const;

 private:
  struct Compiled;
  std::unique_ptr<Compiled> compiled_;
};

}  // namespace tformer
