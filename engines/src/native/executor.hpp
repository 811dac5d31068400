// Runs the instructions of a program: sizes are planned once, a step of sizes that have been there allocates nothing.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"
#include "kernels/kernels.hpp"
#include "native/memory.hpp"
#include "native/pool.hpp"
#include "native/program.hpp"
#include "native/state.hpp"
#include "native/values.hpp"

namespace tformer::native {

/// How a program is run.
struct Choice {
  int threads = 1;
  std::string kernels;  // an instruction set by name; empty: the best that this machine has
};

/// The kernels of a choice. Throws Error for a set that is not known, or that this machine does not have.
const kernels::Kernels& kernels_of(const Choice& choice);

/// Of a model's caches, as a recipe keeps them.
CacheSizes sizes_of(const Model& model, const Recipe& recipe);

class EncoderRun;
class StepRun;
struct Asked;

/// For one thread at a time.
class Executor {
 public:
  Executor(std::shared_ptr<const Program> program, const Model& model, const Recipe& recipe, const Choice& choice);
  ~Executor();

  const CacheSizes& sizes() const { return sizes_; }
  Memory& blocks() { return *memory_; }
  /// The output layer.
  const kernels::Matrix& output() const { return program_->step().instructions.back().matrix; }
  /// Add sentences with sources (B, S) of these lengths, which have what steps read of them.
  void encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& lengths,
              std::vector<Sentence>& sentences);
  /// See `Engine::step`; `best` tokens of each row.
  void step(const std::vector<std::int32_t>& tokens, NativeState& state, std::size_t best, Asked asked, Scores& scores);
  /// See `Engine::memory`. Throws Error where the program has no such graph.
  std::vector<float> memory(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& lengths);
  /// See `Engine::cross_keys_values`.
  std::vector<std::vector<float>> cross_keys_values(const NativeState& state) const;

 private:
  std::shared_ptr<const Program> program_;
  const kernels::Kernels& kernels_;
  CacheSizes sizes_;
  std::shared_ptr<Memory> memory_ = std::make_shared<Memory>();
  Pool pool_;
  std::unique_ptr<EncoderRun> encoder_, alone_;  // alone_: made when it is asked for
  std::unique_ptr<StepRun> step_;
};

}  // namespace tformer::native
