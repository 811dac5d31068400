// A set of allowed outputs, given as token ids without end tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace tformer {

class Trie {
 public:
  struct Node {
    std::map<std::int32_t, std::size_t> next;  ///< the tokens that may follow, and the nodes that they lead to
    bool ends = false;                         ///< whether an output may end here
  };

  explicit Trie(const std::vector<std::vector<std::int32_t>>& outputs);

  /// The node that the tokens from `first` on lead to; null: no allowed output begins so.
  const Node* after(const std::vector<std::int32_t>& ids, std::size_t first) const;
  /// Every token of every output, in order.
  const std::vector<std::int32_t>& tokens() const { return tokens_; }

 private:
  std::vector<Node> nodes_;
  std::vector<std::int32_t> tokens_;
};

}  // namespace tformer
