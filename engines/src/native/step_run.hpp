// One step of every row: its log-probabilities, the best tokens among them.
#pragma once

#include <vector>

#include "native/run.hpp"
#include "native/state.hpp"

namespace tformer::native {

/// What a step returns beside the best tokens.
struct Asked {
  bool all = false;        // log-probabilities of all tokens
  bool attention = false;  // cross-attention weights of the last layer
};

/// The next token of every row.
class StepRun final : public Run {
 public:
  StepRun(const Code& code, const kernels::Kernels& kernels, int threads);
  void prepare(const std::vector<std::int32_t>& tokens, NativeState& state, std::size_t best, Asked asked,
               const CacheSizes& sizes, Memory& memory, Scores& scores);

 private:
  NativeState* state_ = nullptr;
  Scores* scores_ = nullptr;
  CacheSizes sizes_;
  std::int64_t positions_ = 0, sources_ = 0;  // target and source positions of all rows together
  kernels::Matrix matrix_;                    // of the output
  kernels::Output output_;
  kernels::Best best_;
  std::vector<float> largest_, sums_, best_logits_;
  std::vector<std::int32_t> best_ids_;
  std::vector<float> listed_, own_;           // logits of a list: of all its tokens, of those of a row's sentence
  std::vector<float> attention_weights_;      // (rows, heads, attention_ld_) of the last cross-attention, if asked for
  std::int64_t attention_ld_ = 0;

  std::uint32_t pieces_of(const Stage& stage) const override;
  void attend(const Stage& stage, std::uint32_t piece, int worker) override;
  void recur(const Instruction& it, std::size_t row, std::size_t last);
  void output(const Stage& stage, std::uint32_t piece, int worker) override;
  std::int64_t scratch_floats(std::int64_t positions) const override;
  void finish(std::int64_t row, std::int64_t last);
  void finish_listed(std::size_t sentence);
  void mean_attention(std::int64_t row, std::int64_t last);
};

}  // namespace tformer::native
