// The engine of kind growing/1: each step returns caches that are one position longer.
#include <algorithm>
#include <numeric>

#include "errors.hpp"
#include "ort/engines.hpp"
#include "spec.hpp"

namespace tformer {
namespace {

struct GrowingState : State {
  std::vector<std::int32_t> src_lengths;  // (B)
  std::vector<Ort::Value> cross, past;    // 2L of (B, H, S, D); 2L of (rows of the step before, H, T, D) or L of (rows, d)
  std::vector<std::int32_t> parents;      // (B, K)
  std::vector<std::int32_t> position = {0};
  std::int64_t src_len = 0;
};

std::vector<std::int32_t> counted(std::size_t count) {
  std::vector<std::int32_t> numbers(count);
  std::iota(numbers.begin(), numbers.end(), 0);
  return numbers;
}

class GrowingEngine : public Engine {
 public:
  explicit GrowingEngine(std::shared_ptr<const Graphs> graphs)
      : graphs_(std::move(graphs)), cross_(cache_names("cross", graphs_->model())),
        past_(cache_names("past", graphs_->model())), present_(cache_names("present", graphs_->model())) {}

  const ModelInfo& model() const override { return graphs_->model(); }
  const Limits& limits() const override { return graphs_->recipe().limits; }
  bool attention() const override { return graphs_->recipe().attention; }

  std::unique_ptr<State> encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                                const Outlook&) override {
    auto state = std::make_unique<GrowingState>();
    std::vector<std::int32_t> ids = src_ids;
    state->src_lengths = src_lengths;
    state->cross = tformer::encode(*graphs_, ids, state->src_lengths);
    const auto batch = static_cast<std::int64_t>(src_lengths.size());
    state->src_len = static_cast<std::int64_t>(src_ids.size()) / batch;
    state->parents = counted(src_lengths.size());
    const Model& model = graphs_->model();
    const std::vector<std::int64_t> empty = {batch, model.heads, 0, model.head_dim}, states = {batch, model.d_model};
    for (std::size_t i = 0; i < past_.size(); ++i) {
      state->past.push_back(tensor(model.recurrent ? states : empty));
      if (model.recurrent) std::fill_n(state->past[i].GetTensorMutableData<float>(), batch * model.d_model, 0.0F);
    }
    return state;
  }

  std::int64_t best(std::int64_t beams, const State&) const override {
    const std::int64_t top_k = graphs_->recipe().top_k;
    return top_k ? top_k : 2 * beams - 1;
  }

  void step(const std::vector<std::int32_t>& tokens, State& opaque, bool full, bool attention,
            Scores& scores) override {
    auto& state = static_cast<GrowingState&>(opaque);
    const auto batch = static_cast<std::int64_t>(state.src_lengths.size());
    const std::int64_t beams = static_cast<std::int64_t>(tokens.size()) / batch;
    check_step(beams, state.position[0], limits());
    check_tokens(tokens, model().tgt_vocab);
    if (attention && !this->attention()) throw Error(Status::limit, spec::no_attention);
    tokens_ = tokens;
    const Ort::Value fed = tensor(tokens_, {batch, beams}), parents = tensor(state.parents, {batch, beams}),
                     position = tensor(state.position, {1}), lengths = tensor(state.src_lengths, {batch});
    Feed feed;
    feed.input_names = {"tokens", "parents", "position", "src_lengths"};
    feed.inputs = {fed, parents, position, lengths};
    for (std::size_t i = 0; i < cross_.size(); ++i) feed.input(cross_[i], state.cross[i]);
    for (std::size_t i = 0; i < past_.size(); ++i) feed.input(past_[i], state.past[i]);
    std::vector<Ort::Value> found = outputs(batch, beams, state, full, attention, scores);
    const std::size_t own = found.size();
    for (std::size_t i = 0; i < own; ++i) {
      feed.output_names.push_back(output_names[i + (i > 1 && !full ? 1 : 0)]);
      feed.outputs.push_back(found[i]);
    }
    for (const std::string& name : present_) {
      feed.output_names.push_back(name.c_str());
      feed.outputs.push_back(nullptr);
    }
    graphs_->run(Graphs::step, feed);
    for (std::size_t i = 0; i < past_.size(); ++i) state.past[i] = Ort::Value(feed.outputs[own + i]);
    ++state.position[0];
    std::iota(state.parents.begin(), state.parents.end(), 0);
  }

  void reorder(State& opaque, const std::vector<std::int32_t>& parents,
               const std::vector<std::int32_t>& sentences) override {
    auto& state = static_cast<GrowingState&>(opaque);
    std::vector<std::int32_t> rows, lengths;
    for (const std::int32_t row : parents) rows.push_back(state.parents[static_cast<std::size_t>(row)]);
    std::vector<Ort::Value> cross;
    const bool all = all_in_order(sentences, state.src_lengths.size());
    if (!all) cross = gathered(state.cross, sentences);
    for (const std::int32_t sentence : sentences) {
      lengths.push_back(state.src_lengths[static_cast<std::size_t>(sentence)]);
    }
    state.parents = std::move(rows);  // nothing fails from here on
    state.src_lengths = std::move(lengths);
    if (!all) state.cross = std::move(cross);
  }

  std::vector<std::vector<float>> cross_keys_values(const State& opaque) const override {
    return copies(static_cast<const GrowingState&>(opaque).cross);
  }

 private:
  static constexpr const char* output_names[] = {"top_ids", "top_scores", "log_probs", "attention"};
  std::shared_ptr<const Graphs> graphs_;
  std::vector<std::string> cross_, past_, present_;
  std::vector<std::int32_t> tokens_;

  /// Output tensors over `Scores`: top_ids, top_scores, then log_probs and attention on request.
  std::vector<Ort::Value> outputs(std::int64_t batch, std::int64_t beams, const GrowingState& state, bool full,
                                  bool attention, Scores& scores) const {
    scores.best = best(beams, state);
    const auto rows = static_cast<std::size_t>(batch * beams), vocab = static_cast<std::size_t>(model().tgt_vocab);
    scores.ids.resize(rows * static_cast<std::size_t>(scores.best));
    scores.scores.resize(scores.ids.size());
    scores.log_probs.resize(full ? rows * vocab : 0);
    scores.attention.resize(attention ? rows * static_cast<std::size_t>(state.src_len) : 0);
    std::vector<Ort::Value> found;
    found.push_back(tensor(scores.ids, {batch, beams, scores.best}));
    found.push_back(tensor(scores.scores, {batch, beams, scores.best}));
    if (full) found.push_back(tensor(scores.log_probs, {batch, beams, model().tgt_vocab}));
    if (attention) found.push_back(tensor(scores.attention, {batch, beams, state.src_len}));
    return found;
  }
};

}  // namespace

std::unique_ptr<Engine> make_growing(std::shared_ptr<const Graphs> graphs) {
  return std::make_unique<GrowingEngine>(std::move(graphs));
}

}  // namespace tformer
