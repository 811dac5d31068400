// Byte-pair encoding: symbols of a word are merged in pairs, those of the first rule first (Sennrich et al. 2016).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tformer {

/// Rules of two symbols each, in order.
class Merges {
 public:
  /// Throws Error for a rule that is not two symbols.
  explicit Merges(const std::vector<std::string>& rules);

  /// The symbols of a word after all merges. `ends`: where its first symbols end, in bytes of the word.
  std::vector<std::string_view> merge(std::string_view word, const std::vector<std::size_t>& ends) const;

 private:
  struct Rule {
    std::int32_t rank;
    std::int32_t merged;  ///< the symbol that it makes
  };
  static std::uint64_t pair(std::int32_t left, std::int32_t right);
  std::int32_t known(const std::string& symbol);
  const Rule* rule(std::int32_t left, std::int32_t right) const;

  std::unordered_map<std::string, std::int32_t> symbols_;
  std::unordered_map<std::uint64_t, Rule> rules_;
};

}  // namespace tformer
