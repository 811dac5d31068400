// The encoder over some sources, all real tokens of all sentences as rows.
#pragma once

#include <vector>

#include "native/run.hpp"
#include "native/state.hpp"

namespace tformer::native {

/// Sources to what the cross-attentions read of them.
class EncoderRun final : public Run {
 public:
  EncoderRun(const Code& code, const kernels::Kernels& kernels, int threads);
  /// `added` new sentences, the last ones, with sources (added, width).
  void prepare(const std::int32_t* src_ids, std::size_t width, Sentence* added, std::size_t count,
               const CacheSizes& sizes, Memory& memory);
  /// After a run that ends in `give`: what it gives, (added, width, E), zeros behind a source's end.
  std::vector<float> outputs(std::size_t width) const;

 private:
  const Instruction& last_;
  Sentence* sentences_ = nullptr;
  std::size_t count_ = 0;
  std::vector<std::int64_t> first_;  // row of each
  CacheSizes sizes_;
  std::int64_t longest_ = 0;

  std::uint32_t pieces_of(const Stage& stage) const override;
  void attend(const Stage& stage, std::uint32_t piece, int worker) override;
  std::int64_t scratch_floats(std::int64_t positions) const override;
};

}  // namespace tformer::native
