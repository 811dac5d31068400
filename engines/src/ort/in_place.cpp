// The engine of kinds inplace/1, slots/1 and short/1: steps write into cache buffers that stay bound, and copy only
// their best scores.
#include <algorithm>
#include <limits>

#include "errors.hpp"
#include "ort/engines.hpp"
#include "ort/in_place_state.hpp"
#include "spec.hpp"

namespace tformer {
namespace {

class InPlaceEngine : public Engine {
 public:
  explicit InPlaceEngine(std::shared_ptr<const Graphs> graphs)
      : graphs_(std::move(graphs)), cross_(cache_names("cross", graphs_->model())),
        past_(cache_names("past", graphs_->model())), present_(cache_names("present", graphs_->model())) {
    if (!graphs_->shortlist()) return;
    for (const TensorSpec& spec : signature("short_rows", graphs_->model(), graphs_->recipe()).outputs) {
      listed_names_.push_back(spec.name);
    }
  }

  const ModelInfo& model() const override { return graphs_->model(); }
  const Limits& limits() const override { return graphs_->recipe().limits; }
  bool attention() const override { return false; }

  std::int64_t best(std::int64_t beams, const State&) const override { return best_of(beams); }

  std::unique_ptr<State> encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                                const Outlook& outlook) override {
    std::vector<std::int32_t> ids = src_ids, lengths = src_lengths;
    std::vector<Ort::Value> cross = tformer::encode(*graphs_, ids, lengths);
    auto state = std::make_unique<InPlaceState>(graphs_->model(), pool_, std::move(lengths));
    state->cross = std::move(cross);
    if (graphs_->shortlist()) state->listed = shortlist_of(src_ids, src_lengths, outlook);
    return state;
  }

  bool admits() const override { return graphs_->has_slots(); }
  void prepare_to_admit() override { graphs_->open_slots(); }

  void admit(State& opaque, const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
             const Outlook& outlook) override {
    if (!admits()) return Engine::admit(opaque, src_ids, src_lengths, outlook);
    InPlaceState& state = whole(opaque);
    graphs_->open_slots();
    const auto together = static_cast<std::int64_t>(state.slots.size() + src_lengths.size());
    if (together > limits().batch) throw Error(Status::limit, spec::too_many_joined(together, limits().batch));
    std::vector<std::int32_t> ids = src_ids, lengths = src_lengths;
    const std::vector<Ort::Value> own = tformer::encode(*graphs_, ids, lengths);
    change(state, [&] { state.admit(src_lengths, own); });
  }

  void step(const std::vector<std::int32_t>& tokens, State& opaque, bool full, bool attention,
            Scores& scores) override {
    InPlaceState& state = whole(opaque);
    check_step(static_cast<std::int64_t>(tokens.size() / state.slots.size()), state.longest, limits());
    check_tokens(tokens, model().tgt_vocab);
    if (attention) throw Error(Status::limit, spec::no_attention);
    if (state.position[0] == state.capacity) change(state, [&] { state.make_room(); });
    if (!state.bound) bind(state);
    if (full && !state.log_probs) bind_log_probs(state);
    const auto beams = size(state.beams);
    for (std::size_t i = 0; i < state.slots.size(); ++i) {
      std::copy_n(&tokens[i * beams], beams, &state.tokens[size(state.slots[i]) * beams]);
    }
    graphs_->run(state.positions.empty() ? Graphs::step : Graphs::slots, state.feed[full]);
    ++state.position[0];
    ++state.longest;
    for (std::size_t i = 0; !state.positions.empty() && i < state.slots.size() * beams; ++i) {
      ++state.positions[size(state.slots[i / beams]) * beams + i % beams];
    }
    copy_scores(state, full, scores);
  }

  void reorder(State& opaque, const std::vector<std::int32_t>& parents,
               const std::vector<std::int32_t>& sentences) override {
    InPlaceState& state = whole(opaque);
    change(state, [&] { state.reorder(parents, sentences); });
  }

  std::vector<std::vector<float>> cross_keys_values(const State& opaque) const override {
    return copies(whole(opaque).cross);
  }

 private:
  std::shared_ptr<const Graphs> graphs_;
  std::vector<std::string> cross_, past_, present_, listed_names_;
  std::shared_ptr<BufferPool> pool_ = std::make_shared<BufferPool>();

  /// The state of a call. Throws Error where it has lost its caches.
  static const InPlaceState& whole(const State& opaque) {
    const auto& state = static_cast<const InPlaceState&>(opaque);
    if (!state.lost()) return state;
    throw Error(Status::no_memory, "the caches were lost when memory ran out: encode again");
  }
  static InPlaceState& whole(State& opaque) {
    return const_cast<InPlaceState&>(whole(static_cast<const State&>(opaque)));
  }

  /// Change the caches. If memory runs out meanwhile, they are lost.
  template <typename Work>
  static void change(InPlaceState& state, const Work& work) {
    state.changing = true;
    work();
    state.changing = false;
  }

  std::int64_t best_of(std::int64_t beams) const {
    const std::int64_t top_k = graphs_->recipe().top_k;
    return top_k ? top_k : 2 * beams;
  }

  /// The shortlist of a batch, and its part of the output matrix.
  std::unique_ptr<ShortlistState> shortlist_of(const std::vector<std::int32_t>& src_ids,
                                               const std::vector<std::int32_t>& lengths,
                                               const Outlook& outlook) const {
    Lists lists = lists_of(*graphs_->shortlist(), src_ids, lengths, outlook.required);
    auto listed = std::make_unique<ShortlistState>();
    listed->ids = std::move(lists.ids);
    const std::size_t least = std::max(listed->ids.size(), size(best_of(limits().beams)));
    const std::size_t unit = size(spec::list_unit), count = (least + unit - 1) / unit * unit;
    listed->filled = listed->ids;
    listed->filled.resize(count, 0);
    listed->mask.assign(lengths.size() * count, -std::numeric_limits<float>::infinity());
    for (std::size_t b = 0; b < lengths.size(); ++b) {
      for (const std::int32_t place : lists.places[b]) listed->mask[b * count + size(place)] = 0;
    }
    static const std::string input = "shortlist";
    listed->filled_value = tensor(listed->filled, {static_cast<std::int64_t>(count)});
    Feed feed;
    feed.input(input, listed->filled_value);
    for (const std::string& name : listed_names_) {
      feed.output_names.push_back(name.c_str());
      feed.outputs.push_back(nullptr);
    }
    graphs_->run(Graphs::rows, feed);
    for (OrtValue* value : feed.outputs) listed->rows.emplace_back(value);
    return listed;
  }

  /// Bind every input and output of the step but the full log-probabilities.
  void bind(InPlaceState& state) const {
    const std::int64_t rows = state.batch * state.beams, best = best_of(state.beams);
    state.top_ids.resize(size(rows * best));
    state.top_scores.resize(state.top_ids.size());
    state.log_probs.reset();
    state.values.clear();
    state.values.reserve(9);
    const auto keep = [&state](Ort::Value value) -> const Ort::Value& {
      return state.values.emplace_back(std::move(value));
    };
    Feed feed;
    feed.input_names = {"tokens", "position", "written_by", "src_lengths"};
    feed.inputs = {keep(tensor(state.tokens, {state.batch, state.beams})), keep(tensor(state.position, {1})),
                   keep(tensor(state.written_by, {state.batch, state.beams, state.capacity})),
                   keep(tensor(state.src_lengths, {state.batch}))};
    if (!state.positions.empty()) {
      feed.input_names.push_back("positions");
      feed.inputs.push_back(keep(tensor(state.positions, {state.batch, state.beams})));
    }
    for (std::size_t i = 0; i < cross_.size(); ++i) feed.input(cross_[i], state.cross[i]);
    for (std::size_t i = 0; i < past_.size(); ++i) feed.input(past_[i], state.past[i].value());
    if (state.listed) {
      ShortlistState& listed = *state.listed;
      feed.input_names.push_back("shortlist");
      feed.inputs.push_back(listed.filled_value);
      for (std::size_t i = 0; i < listed_names_.size(); ++i) feed.input(listed_names_[i], listed.rows[i]);
      const auto count = static_cast<std::int64_t>(listed.filled.size());
      feed.input_names.push_back("listed_mask");
      feed.inputs.push_back(keep(tensor(listed.mask, {state.batch, 1, count})));
    }
    feed.output_names = {"top_ids", "top_scores"};
    state.values.push_back(tensor(state.top_ids, {rows, best}));
    feed.outputs.push_back(state.values.back());
    state.values.push_back(tensor(state.top_scores, {rows, best}));
    feed.outputs.push_back(state.values.back());
    for (std::size_t i = 0; i < present_.size(); ++i) feed.output(present_[i], state.past[i].value());
    state.feed[0] = feed;
    state.feed[1] = std::move(feed);
    state.bound = true;
  }

  void bind_log_probs(InPlaceState& state) const {
    const std::int64_t rows = state.batch * state.beams;
    const std::size_t scored = state.listed ? state.listed->filled.size() : size(model().tgt_vocab);
    Feed& feed = state.feed[1];
    feed.output_names.reserve(feed.output_names.size() + 1);  // so that nothing fails once there is a buffer
    feed.outputs.reserve(feed.outputs.size() + 1);
    state.log_probs.emplace(std::vector<std::int64_t>{rows, static_cast<std::int64_t>(scored)}, pool_);
    feed.output_names.push_back("log_probs");
    feed.outputs.push_back(state.log_probs->value());
  }

  /// Copy the scores of the sentences that are still running.
  void copy_scores(const InPlaceState& state, bool full, Scores& scores) const {
    const std::size_t beams = size(state.beams), best = state.top_ids.size() / state.tokens.size();
    const std::size_t count = state.slots.size(), vocab = size(model().tgt_vocab);
    scores.best = static_cast<std::int64_t>(best);
    scores.ids.resize(count * beams * best);
    scores.scores.resize(scores.ids.size());
    scores.attention.clear();
    scores.log_probs.clear();
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t slot = size(state.slots[i]), own = beams * best;
      std::copy_n(&state.top_ids[slot * own], own, &scores.ids[i * own]);
      std::copy_n(&state.top_scores[slot * own], own, &scores.scores[i * own]);
    }
    if (!full) return;
    scores.log_probs.reserve(count * beams * vocab);
    for (const std::int32_t slot : state.slots) {
      if (!state.listed) {
        const float* const from = state.log_probs->data() + size(slot) * beams * vocab;
        scores.log_probs.insert(scores.log_probs.end(), from, from + beams * vocab);
        continue;
      }
      const std::vector<std::int32_t>& ids = state.listed->ids;
      const std::size_t width = state.listed->filled.size();
      for (std::size_t row = size(slot) * beams; row < (size(slot) + 1) * beams; ++row) {
        scores.log_probs.insert(scores.log_probs.end(), vocab, -std::numeric_limits<float>::infinity());
        float* const to = &scores.log_probs[scores.log_probs.size() - vocab];
        for (std::size_t at = 0; at < ids.size(); ++at) to[ids[at]] = state.log_probs->data()[row * width + at];
      }
    }
  }
};

}  // namespace

std::unique_ptr<Engine> make_in_place(std::shared_ptr<const Graphs> graphs) {
  return std::make_unique<InPlaceEngine>(std::move(graphs));
}

}  // namespace tformer
