// What every row of a search has written so far, and where it looked: of each step, its rows' tokens and parents.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tformer {

class History {
 public:
  std::size_t steps() const { return begins_.size(); }

  /// Remember where the rows (B * K, S) that a step was fed looked.
  void look(const std::vector<float>& attention, std::size_t rows);
  /// Remember a step: the rows that go on, each with its token and the row of the step before that it continues.
  void add(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& tokens);

  /// The tokens of a row that the next step is fed, first one first.
  void written(std::size_t row, std::vector<std::int32_t>& tokens) const;
  /// Where the steps looked whose last one was fed a row: S numbers each, first one first.
  std::vector<const float*> looks(std::size_t row) const;

 private:
  std::vector<std::size_t> begins_;           ///< of each step in the next two
  std::vector<std::int32_t> parents_, tokens_;
  std::vector<std::vector<float>> attention_;  ///< of each step
  std::vector<std::size_t> widths_;            ///< S
};

}  // namespace tformer
