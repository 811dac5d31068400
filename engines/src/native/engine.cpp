// An engine over a program: each sentence at a place and a position of its own, so that others join at any time.
#include <algorithm>

#include "cores.hpp"
#include "errors.hpp"
#include "log.hpp"
#include "native/engines.hpp"
#include "native/executor.hpp"
#include "native/state.hpp"
#include "native/step_run.hpp"
#include "shortlist.hpp"
#include "spec.hpp"

namespace tformer {
namespace {

using native::Executor;
using native::NativeState;

class NativeEngine final : public Engine {
 public:
  NativeEngine(std::shared_ptr<const Bundle> bundle, const std::string& variant,
               std::shared_ptr<const native::Program> program, std::shared_ptr<const Shortlist> shortlist,
               const native::Choice& choice)
      : bundle_(std::move(bundle)), shortlist_(std::move(shortlist)), model_(bundle_->model()),
        recipe_(bundle_->recipe(variant)), executor_(std::move(program), model_, recipe_, choice) {}

  const ModelInfo& model() const override { return model_; }
  const Limits& limits() const override { return recipe_.limits; }
  bool attention() const override { return true; }
  bool admits() const override { return !shortlist_; }
  std::int64_t best(std::int64_t beams, const State&) const override {
    return recipe_.top_k ? recipe_.top_k : std::min<std::int64_t>(2 * beams, model_.tgt_vocab);
  }

  std::unique_ptr<State> encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                                const Outlook& outlook) override {
    auto state = std::make_unique<NativeState>();
    add(*state, src_ids, src_lengths, outlook);
    if (!shortlist_) return state;
    Lists lists = lists_of(*shortlist_, src_ids, src_lengths, outlook.required);
    for (std::size_t i = 0; i < lists.places.size(); ++i) state->sentences[i].listed = std::move(lists.places[i]);
    state->listed = std::make_unique<native::ShortlistWeights>(executor_.output(), std::move(lists.ids), executor_.blocks());
    return state;
  }

  void admit(State& opaque, const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
             const Outlook& outlook) override {
    if (!admits()) return Engine::admit(opaque, src_ids, src_lengths, outlook);
    auto& state = static_cast<NativeState&>(opaque);
    const auto together = static_cast<std::int64_t>(state.sentences.size() + src_lengths.size());
    if (together > limits().batch) throw Error(Status::limit, spec::too_many_joined(together, limits().batch));
    add(state, src_ids, src_lengths, outlook);
  }

  void step(const std::vector<std::int32_t>& tokens, State& opaque, bool full, bool attention,
            Scores& scores) override {
    auto& state = static_cast<NativeState&>(opaque);
    std::size_t longest = 0;
    for (const native::Sentence& each : state.sentences) longest = std::max(longest, each.position);
    check_step(static_cast<std::int64_t>(state.beams), static_cast<std::int64_t>(longest), limits());
    check_tokens(tokens, model_.tgt_vocab);
    executor_.step(tokens, state, static_cast<std::size_t>(best(static_cast<std::int64_t>(state.beams), state)),
                   {full, attention}, scores);
  }

  void reorder(State& opaque, const std::vector<std::int32_t>& parents,
               const std::vector<std::int32_t>& sentences) override {
    static_cast<NativeState&>(opaque).reorder(parents, sentences, executor_.sizes(), executor_.blocks());
  }

  std::vector<float> memory(const std::vector<std::int32_t>& src_ids,
                            const std::vector<std::int32_t>& src_lengths) override {
    check_request(src_ids, src_lengths, model_, limits());
    return executor_.memory(src_ids, src_lengths);
  }

  std::vector<std::vector<float>> cross_keys_values(const State& opaque) const override {
    return executor_.cross_keys_values(static_cast<const NativeState&>(opaque));
  }

 private:
  std::shared_ptr<const Bundle> bundle_;
  std::shared_ptr<const Shortlist> shortlist_;
  const Model& model_;
  const Recipe& recipe_;
  Executor executor_;

  void add(NativeState& state, const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
           const Outlook& outlook) {
    check_request(src_ids, src_lengths, model_, limits());
    executor_.encode(src_ids, src_lengths, state.sentences);
    state.src_width = std::max(state.src_width, src_ids.size() / src_lengths.size());  // nothing fails from here on
    state.most_beams = std::max({state.most_beams, state.beams, static_cast<std::size_t>(outlook.beams)});
  }
};

class Programs final : public Backend {
 public:
  Programs(std::shared_ptr<const Bundle> bundle, const OpenOptions& options)
      : bundle_(std::move(bundle)), variant_(variant(*bundle_, options.variant)) {
    bundle_->require_kinds(variant_);
    choice_.threads = options.threads ? options.threads : cores();
    choice_.kernels = options.kernels;
    native::kernels_of(choice_);  // refuses what this machine does not have, before anything is read
    if (options.shortlist) shortlist_ = std::make_shared<const Shortlist>(open_shortlist(*bundle_, variant_));
    program_ = std::make_shared<const native::Program>(*bundle_, variant_);
    const native::CacheSizes sizes = native::sizes_of(bundle_->model(), bundle_->recipe(variant_));
    batch_tokens_ = suiting(program_->step(), sizes, shortlist_ != nullptr);
    log(Level::info, [&] {
      return variant_ + ": kernels " + native::kernels_of(choice_).name +
             (choice_.kernels.empty() ? ", the best of this machine" : ", as asked for") + "; batches of " +
             std::to_string(batch_tokens_) + " tokens";
    });
  }

  const Model& model() const override { return bundle_->model(); }
  const Limits& limits() const override { return bundle_->recipe(variant_).limits; }
  std::string variant() const override { return variant_; }
  std::int64_t batch_tokens() const override { return batch_tokens_; }
  std::unique_ptr<Engine> make_engine() const override {
    return std::make_unique<NativeEngine>(bundle_, variant_, program_, shortlist_, choice_);
  }

 private:
  std::shared_ptr<const Bundle> bundle_;
  std::string variant_;
  native::Choice choice_;
  std::shared_ptr<const Shortlist> shortlist_;
  std::shared_ptr<const native::Program> program_;
  std::int64_t batch_tokens_ = 0;

  /// So many that caches, of targets as long as the sources, are 4 times what a step reads of weights: with fewer, weights
  /// are read for too few rows; with more, a small model's batch leaves a core's own cache. 256 to 4,096, the usual batch.
  /// With lists (`listed`) the output's weights do not count, as few of them are read.
  static std::int64_t suiting(const native::Code& step, const native::CacheSizes& sizes, bool listed) {
    std::int64_t weights = 0;
    for (const native::Instruction& each : step.instructions) {
      const bool read = each.matrix.weights && !(listed && each.op == native::Op::output);
      if (read) weights += kernels::panels_of(each.matrix) * kernels::panel_bytes(each.matrix);
    }
    const auto keys = static_cast<std::int64_t>(sizes.bytes(sizes.layers * sizes.heads * sizes.size));
    const std::int64_t token = 2 * 2 * keys;  // keys and values of its source, and of its target
    return std::clamp<std::int64_t>(4 * weights / token, 256, spec::batch_tokens);
  }

  /// The program that is named, or the first. Throws Error.
  static std::string variant(const Bundle& bundle, const std::string& name) {
    const std::vector<std::string> programs = bundle.programs();
    if (programs.empty()) {
      throw Error(Status::usage,
                  bundle.directory().string() + " has no program for native: export it again and add --recipe native-int8");
    }
    if (name.empty()) return programs.front();
    if (std::find(programs.begin(), programs.end(), name) == programs.end()) {
      throw Error(Status::usage, unknown("variant", name, programs));
    }
    return name;
  }
};

}  // namespace

std::shared_ptr<const Backend> open_program(std::shared_ptr<const Bundle> bundle, const OpenOptions& options) {
  return std::make_shared<const Programs>(std::move(bundle), options);
}

}  // namespace tformer
