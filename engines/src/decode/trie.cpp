#include "decode/trie.hpp"

#include <set>

namespace tformer {

Trie::Trie(const std::vector<std::vector<std::int32_t>>& outputs) : nodes_(1) {
  std::set<std::int32_t> tokens;
  for (const auto& output : outputs) {
    std::size_t node = 0;
    for (const std::int32_t token : output) {
      const auto [found, added] = nodes_[node].next.try_emplace(token, nodes_.size());
      node = found->second;
      if (added) nodes_.emplace_back();
    }
    nodes_[node].ends = true;
    tokens.insert(output.begin(), output.end());
  }
  tokens_.assign(tokens.begin(), tokens.end());
}

const Trie::Node* Trie::after(const std::vector<std::int32_t>& ids, std::size_t first) const {
  const Node* node = nodes_.data();
  for (std::size_t i = first; i < ids.size(); ++i) {
    const auto found = node->next.find(ids[i]);
    if (found == node->next.end()) return nullptr;
    node = &nodes_[found->second];
  }
  return node;
}

}  // namespace tformer
