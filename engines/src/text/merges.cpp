#include "text/merges.hpp"

#include <algorithm>
#include <functional>

#include "errors.hpp"

namespace tformer {
namespace {

struct Symbol {
  std::size_t end;      ///< within the word's bytes
  std::int32_t number;  ///< -1: no rule has it
  std::int32_t before, behind;  ///< its neighbours, or -1
  bool gone;
};

struct Pair {
  std::int32_t rank;
  std::int32_t left;  ///< index of its first symbol
  std::int32_t a, b;  ///< what the symbols were
  bool operator>(const Pair& other) const { return std::pair(rank, left) > std::pair(other.rank, other.left); }
};

}  // namespace

Merges::Merges(const std::vector<std::string>& rules) {
  std::int32_t rank = 0;
  for (const std::string& text : rules) {
    const std::size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
      throw Error(Status::bundle, "the merge rule '" + text.substr(0, 40) + "' is not two symbols");
    }
    const std::string left = text.substr(0, space), right = text.substr(space + 1);
    const std::int32_t a = known(left), b = known(right);
    rules_.try_emplace(pair(a, b), Rule{rank++, known(left + right)});
  }
}

std::uint64_t Merges::pair(std::int32_t left, std::int32_t right) {
  return (static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32U) | static_cast<std::uint32_t>(right);
}

std::int32_t Merges::known(const std::string& symbol) {
  return symbols_.try_emplace(symbol, static_cast<std::int32_t>(symbols_.size())).first->second;
}

const Merges::Rule* Merges::rule(std::int32_t left, std::int32_t right) const {
  if (left < 0 || right < 0) return nullptr;
  const auto found = rules_.find(pair(left, right));
  return found == rules_.end() ? nullptr : &found->second;
}

std::vector<std::string_view> Merges::merge(std::string_view word, const std::vector<std::size_t>& ends) const {
  std::vector<Symbol> row;
  std::size_t start = 0;
  for (const std::size_t end : ends) {
    const auto found = symbols_.find(std::string(word.substr(start, end - start)));
    const auto i = static_cast<std::int32_t>(row.size());
    row.push_back({end, found == symbols_.end() ? -1 : found->second, i - 1, i + 1, false});
    start = end;
  }
  if (!row.empty()) row.back().behind = -1;
  const auto at = [&row](std::int32_t i) -> Symbol& { return row[static_cast<std::size_t>(i)]; };

  std::vector<Pair> waiting, fresh;  // a heap, the first rule and the leftmost place first
  const auto found = [&](std::int32_t left) {
    const std::int32_t right = left < 0 ? -1 : at(left).behind;
    if (right < 0) return;
    const Rule* rule = this->rule(at(left).number, at(right).number);
    if (rule) fresh.push_back({rule->rank, left, at(left).number, at(right).number});
  };
  for (std::int32_t i = 0; i < static_cast<std::int32_t>(row.size()); ++i) found(i);

  for (std::int32_t rank = -1; !waiting.empty() || !fresh.empty();) {
    // A rule is applied wherever it matches before pairs with its results are considered.
    if (waiting.empty() || waiting.front().rank != rank) {
      for (const Pair& pair : fresh) {
        waiting.push_back(pair);
        std::push_heap(waiting.begin(), waiting.end(), std::greater<>());
      }
      fresh.clear();
      rank = waiting.front().rank;
    }
    std::pop_heap(waiting.begin(), waiting.end(), std::greater<>());
    const Pair next = waiting.back();
    waiting.pop_back();
    Symbol& left = at(next.left);
    if (left.gone || left.behind < 0 || left.number != next.a || at(left.behind).number != next.b) continue;
    Symbol& right = at(left.behind);
    left.number = rule(next.a, next.b)->merged;
    left.end = right.end;
    left.behind = right.behind;
    right.gone = true;
    if (left.behind >= 0) at(left.behind).before = next.left;
    found(left.before);
    found(next.left);
  }

  std::vector<std::string_view> symbols;
  start = 0;
  for (const Symbol& symbol : row) {
    if (symbol.gone) continue;
    symbols.push_back(word.substr(start, symbol.end - start));
    start = symbol.end;
  }
  return symbols;
}

}  // namespace tformer
