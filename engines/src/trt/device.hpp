// One batch on the GPU: the memory of its tensors, a stream, and the encoder and step recorded as CUDA graphs.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine.hpp"
#include "trt/cuda.hpp"
#include "trt/library.hpp"

namespace nvinfer1 {
class IExecutionContext;
}  // namespace nvinfer1

namespace tformer {

/// Inputs that one step chooses for the next: (B, K) each, over the device's sentences and rows.
struct NextInputs {
  std::vector<std::int32_t> tokens;
  std::vector<std::int32_t> parents;  ///< rows, counted over B*K
  std::vector<float> values;          ///< sums so far
  std::vector<std::int32_t> positions;  ///< in the target of each sentence
};

/// Outputs of a step.
struct Record {
  std::vector<std::int32_t> ids;  ///< (B*K, k), best first
  std::vector<float> scores;      ///< (B*K, k)
  NextInputs next;                ///< what the device feeds to the step after it
};

/// Runs the two plans of a profile. Steps are counted from 0; even ones read what odd ones write, and the other way
/// round, so that the last step can be done again. For one thread at a time. Everything throws Error.
class TrtDevice {
 public:
  using Plan = std::shared_ptr<nvinfer1::ICudaEngine>;

  /// Takes memory and prepares the plans; needs an OnGpu. `cross`: names of the encoder's outputs.
  TrtDevice(const TrtRuntime& runtime, const Profile& profile, Plan encoder, Plan step,
            const std::vector<std::string>& cross);
  ~TrtDevice();

  const Profile profile;
  /// Tokens that a step returns per row.
  std::int64_t best() const { return best_; }
  /// Why steps are not replayed as CUDA graphs; empty: they are.
  const std::string& not_captured() const { return not_captured_; }

  /// Run the encoder on sources (B, S) with lengths (B), of the profile's sizes.
  void encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
              const Outlook& outlook);
  /// Overwrite the inputs that the device chose for step `step`.
  void feed(const NextInputs& choice, std::int64_t step);
  /// Enqueue a step; does not wait for it.
  void issue(std::int64_t step);
  /// Outputs of one of the last two steps; waits for it.
  void read(std::int64_t step, Record& record);
  /// All log-probabilities (B*K, V) of the step that was issued last.
  const std::vector<float>& log_probs();
  /// The encoder's outputs, 2L of (B, H, S, D).
  std::vector<std::vector<float>> cross();
  /// Take over the first `filled` keys and values that step `step` reads of another device's rows; waits for both.
  void take_over(TrtDevice& other, const std::vector<std::int32_t>& theirs, const std::vector<std::int32_t>& ours,
                 std::int64_t filled, std::int64_t step);

 private:
  /// An input or output: its type, size and place in a block of memory.
  struct Tensor {
    std::int32_t type = 0;  ///< nvinfer1::DataType
    std::vector<std::int64_t> shape;
    std::size_t bytes = 0;
    std::size_t offset = 0;
  };
  struct Freed {
    void operator()(nvinfer1::IExecutionContext* context) const noexcept;
  };
  struct Launch {
    std::unique_ptr<Memory> scratch;  ///< the context's workspace, where it does not allocate its own
    std::unique_ptr<nvinfer1::IExecutionContext, Freed> context;
    std::unique_ptr<Graph> graph;  ///< null: the plan is enqueued anew each time
  };
  using Addresses = std::map<std::string, std::uint64_t>;

  const TrtRuntime& runtime_;
  const Plan encoder_, step_;
  const std::vector<std::string> cross_names_;
  std::map<std::string, Tensor> tensors_;
  std::vector<std::string> fed_;     ///< names of the inputs that a step chooses for the next one
  std::vector<std::string> pasts_of_;  ///< names of the caches that a step reads
  std::int64_t best_ = 0;
  std::size_t given_size_ = 0, fed_size_ = 0, turn_size_ = 0, past_size_ = 0;
  std::string not_captured_;
  std::vector<float> log_probs_;
  // Freed in the reverse order.
  Stream stream_;
  std::map<std::string, std::unique_ptr<Memory>> memory_;
  std::unique_ptr<Memory> given_, turns_[2], pasts_[2];
  std::unique_ptr<Pinned> requests_, choices_, slots_[2];
  std::map<std::string, std::unique_ptr<Pinned>> fetched_;
  Event ends_[2];
  Launch launches_[3];  ///< even steps, odd steps, the encoder

  void finish() noexcept;
  void note_tensors(nvinfer1::ICudaEngine& plan);
  void require_tensors() const;
  std::size_t lay_out(const std::vector<std::string>& names);
  void take_memory();
  Addresses addresses(int now) const;
  void prepare(nvinfer1::ICudaEngine& plan, const Addresses& places, Launch& launch);
  void run(Launch& launch);
  std::vector<float> fetch(const std::string& name);
  template <typename Value>
  Value* view(const Pinned& block, const std::string& name) const;
};

}  // namespace tformer
