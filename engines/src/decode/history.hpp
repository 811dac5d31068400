// The tokens and attention of every row so far, stored as each step's tokens and parent rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tformer {

class History {
 public:
  std::size_t steps() const { return begins_.size(); }

  /// Store the attention weights (B * K, S) of a step.
  void look(const std::vector<float>& attention, std::size_t rows);
  /// Store a step: the rows that continue, each with its token and the row of the previous step that it continues.
  void add(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& tokens);

  /// All tokens of a row that the next step is fed, in order.
  void written(std::size_t row, std::vector<std::int32_t>& tokens) const;
  /// Attention weights of the steps that led to a row: S per step, in order.
  std::vector<const float*> looks(std::size_t row) const;

 private:
  std::vector<std::size_t> begins_;           ///< of each step in the next two
  std::vector<std::int32_t> parents_, tokens_;
  std::vector<std::vector<float>> attention_;  ///< of each step
  std::vector<std::size_t> widths_;            ///< S
};

}  // namespace tformer
