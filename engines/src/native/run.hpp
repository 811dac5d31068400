// One graph's instructions over rows: what each stage of a `Pool` does.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/kernels.hpp"
#include "native/memory.hpp"
#include "native/pool.hpp"
#include "native/program.hpp"
#include "native/state.hpp"
#include "native/values.hpp"

namespace tformer::native {

/// What the encoder and the step share.
class Run : public Job {
 public:
  Run(const Code& code, const kernels::Kernels& kernels, int threads);

  std::size_t stages() const override { return stages_.size(); }
  std::uint32_t pieces(std::size_t stage) const override { return stages_[stage].pieces; }
  void piece(std::size_t stage, std::uint32_t piece, int worker) override;
  /// An instruction, or a part of one.
  struct Stage {
    const Instruction* it;
    enum Part { whole, groups, finish } part;  // groups: its inputs in groups; finish: its end
    std::uint32_t pieces = 1;
    std::uint32_t columns = 1;  // of a product: pieces side by side
  };

  const Stage& stage(std::size_t number) const { return stages_[number]; }

 protected:
  /// What one thread does in a nanosecond: at most half of what tests/kernel_speed measures on one core with AVX-512 (27
  /// bytes, 235 products of 8 bits, 53 of fp32). Only how work is cut depends on it.
  static constexpr double floats_moved = 3, bytes_read = 12, integers_multiplied = 120, floats_multiplied = 20;

  const kernels::Kernels& kernels_;
  const int threads_;
  std::vector<Stage> stages_;
  Values values_;
  std::int64_t rows_ = 0;
  std::vector<std::int32_t> ids_, places_;  // of each row: its token, and where it stands in its text

  /// Give every stage its pieces for so many rows, and memory; `positions`: the most that an attention reads.
  void plan(std::int64_t rows, std::int64_t positions, Memory& memory);
  /// Into how many pieces work is cut that takes one thread so many nanoseconds, of at most `most`.
  std::uint32_t share(double nanoseconds, std::int64_t most) const;
  /// Pieces of work that is not rows times columns.
  virtual std::uint32_t pieces_of(const Stage& stage) const = 0;
  virtual void attend(const Stage& stage, std::uint32_t piece, int worker) = 0;
  virtual void output(const Stage&, std::uint32_t, int) {}
  const Values& values() const { return values_; }
  /// Floats of a thread's own.
  virtual std::int64_t scratch_floats(std::int64_t positions) const = 0;
  float* scratch(int worker) const { return scratch_[static_cast<std::size_t>(worker)].data(); }
  kernels::Input input(const Instruction& it) const;
  /// Where an instruction writes, from a row and a column on.
  kernels::Target target(const Instruction& it, std::size_t row = 0, std::int64_t column = 0) const {
    kernels::Target to;
    to.floats = values_.floats(it.out, row);
    to.ld = static_cast<std::int64_t>(values_.stride(it.out));
    to.bytes = values_.bytes(it.rounded, row);
    to.bytes_ld = static_cast<std::int64_t>(values_.stride(it.rounded));
    to.rounding = it.rounding;
    if (!column) return to;
    if (to.floats) to.floats += column;
    if (to.bytes) to.bytes += column;
    if (to.rounding.shrink) to.rounding.shrink += column;
    return to;
  }
  /// `work(sentence, head, heads)` for the part `piece` of all heads of all sentences.
  template <typename Work>
  void heads_of(const Stage& stage, std::uint32_t piece, std::int64_t sentences, const Work& work) const {
    const std::int64_t heads = stage.it->heads, units = sentences * heads, count = stage.pieces;
    const std::int64_t last = units * (piece + 1) / count;
    for (std::int64_t unit = units * piece / count; unit < last;) {
      const std::int64_t head = unit % heads, together = std::min(heads - head, last - unit);
      work(static_cast<std::size_t>(unit / heads), head, together);
      unit += together;
    }
  }

 private:
  std::vector<Block> scratch_;
  std::int64_t scratch_size_ = 0, group_rows_ = 0;
  Block group_integers_, group_scales_, group_sums_;  // what the next int4 product reads

  double cost(const Instruction& it) const;
  void elementwise(const Instruction& it, std::int64_t row, std::int64_t rows);
  void normalise(const Instruction& it, std::int64_t row, std::int64_t rows);
  void embed(const Instruction& it, std::int64_t row, std::int64_t rows);
  void product(const Stage& stage, std::uint32_t piece);
};

}  // namespace tformer::native
