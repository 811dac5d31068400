// The engine over TensorRT plans: the GPU runs steps ahead of the search.
//
// Each step chooses the inputs of the next one, so that the GPU need not wait for the search. The search still decides:
// it gets every step's scores, one step late, and where it chooses other rows than the GPU did, that step runs again.
#include <algorithm>

#include "errors.hpp"
#include "spec.hpp"
#include "trt/model.hpp"

namespace tformer {
namespace {

using spec::dead;

struct SpeculativeState final : State {
  SpeculativeState(std::shared_ptr<const TrtModel> owner, std::unique_ptr<TrtDevice> taken)
      : model(std::move(owner)), device(std::move(taken)) {}
  ~SpeculativeState() override {
    if (device) model->give_back(std::move(device));
  }

  std::shared_ptr<const TrtModel> model;
  std::unique_ptr<TrtDevice> device;
  std::size_t sentences = 0;          // B of the search
  std::vector<std::int32_t> parents;  // (B, K) device rows that the next step's rows continue
  std::int64_t steps = 0;             // steps that the device may run ahead of the search
  std::int64_t position = 0;          // steps done
  bool speculative = false;           // the device has been given the next step too, by its own choice
  bool recorded = false;
  Record record;                      // of the last step
  std::vector<float> sums;            // (device rows) `values` that the last step was fed
  int misses = 0;
  NextInputs choice;                  // reused, so that no step allocates
  std::vector<std::int32_t> places;   // (B, K) device rows of the search's rows

  std::size_t width() const { return parents.size() / sentences; }
  std::size_t sentence(std::size_t b) const { return size(parents[b * width()] / device->profile.beams); }
};

class SpeculativeEngine final : public Engine {
 public:
  explicit SpeculativeEngine(std::shared_ptr<const TrtModel> model) : model_(std::move(model)) {}

  const ModelInfo& model() const override { return model_->model(); }
  const Limits& limits() const override { return model_->limits(); }
  bool attention() const override { return false; }
  std::int64_t best(std::int64_t, const State& state) const override {
    return static_cast<const SpeculativeState&>(state).device->best();
  }

  std::unique_ptr<State> encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                                const Outlook& outlook) override {
    check_request(src_ids, src_lengths, model(), limits());
    const std::size_t batch = src_lengths.size(), width = src_ids.size() / batch;
    const std::int64_t tokens = std::min(outlook.tokens ? outlook.tokens : limits().tgt_tokens, limits().tgt_tokens);
    auto state = std::make_unique<SpeculativeState>(
        model_, model_->take({static_cast<std::int64_t>(batch), outlook.beams ? outlook.beams : limits().beams,
                              static_cast<std::int64_t>(width), tokens}));
    const Profile& profile = state->device->profile;
    std::vector<std::int32_t> ids(size(profile.batch * profile.src_len), model().pad_id);
    std::vector<std::int32_t> lengths(size(profile.batch), 1);  // padding sentences have one token
    for (std::size_t b = 0; b < batch; ++b) {
      std::copy_n(&src_ids[b * width], width, &ids[b * size(profile.src_len)]);
      lengths[b] = src_lengths[b];
      state->parents.push_back(static_cast<std::int32_t>(b * size(profile.beams)));
    }
    state->sentences = batch;
    if (!outlook.drawn) state->steps = tokens;
    try {
      state->device->encode(ids, lengths, outlook);
    } catch (...) {
      state->device.reset();
      throw;
    }
    return state;
  }

  void step(const std::vector<std::int32_t>& tokens, State& opaque, bool full, bool attention,
            Scores& scores) override {
    auto& state = static_cast<SpeculativeState&>(opaque);
    require_room(state, tokens.size() / state.sentences, attention);
    if (!state.speculative || !chosen(tokens, state)) feed(tokens, state);
    const std::int64_t following = state.position + 1;
    state.speculative = !full && state.misses < spec::most_misses && following < state.steps &&
                  following < state.device->profile.capacity;
    if (state.speculative) state.device->issue(following);
    state.device->read(state.position, state.record);
    state.recorded = true;
    copy_scores(state, full, scores);
    state.parents.swap(state.places);
    state.position = following;
  }

  void reorder(State& opaque, const std::vector<std::int32_t>& parents,
               const std::vector<std::int32_t>& sentences) override {
    auto& state = static_cast<SpeculativeState&>(opaque);
    state.places.clear();
    for (const std::int32_t row : parents) state.places.push_back(state.parents[size(row)]);
    state.parents.swap(state.places);
    state.sentences = sentences.size();
  }

  std::vector<std::vector<float>> cross_keys_values(const State& opaque) const override {
    const auto& state = static_cast<const SpeculativeState&>(opaque);
    return state.device->cross();
  }

 private:
  std::shared_ptr<const TrtModel> model_;

  static void require_room(const SpeculativeState& state, std::size_t width, bool attention) {
    const Profile& profile = state.device->profile;
    const auto refuse = [](const std::string& message) { throw Error(Status::limit, message); };
    if (static_cast<std::int64_t>(width) > profile.beams) {
      refuse(std::to_string(width) + " beams exceed the " + std::to_string(profile.beams) +
             " that were announced: " + profile.shown());
    }
    if (attention) refuse(spec::no_attention);
    if (state.position == profile.capacity) {
      refuse("decoding step " + std::to_string(state.position + 1) + " is beyond what was announced: " +
             profile.shown());
    }
  }

  /// Whether the device's own choice has every row that the search wants, in any order; `places` are then those rows.
  static bool chosen(const std::vector<std::int32_t>& tokens, SpeculativeState& state) {
    const NextInputs& own = state.record.next;
    const std::size_t beams = size(state.device->profile.beams), width = tokens.size() / state.sentences;
    state.places.resize(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const std::size_t first = state.sentence(i / width) * beams;
      std::size_t row = first;
      while (row < first + beams && (own.tokens[row] != tokens[i] || own.parents[row] != state.parents[i])) ++row;
      if (row == first + beams) {
        ++state.misses;
        return false;
      }
      state.places[i] = static_cast<std::int32_t>(row);
    }
    state.sums = own.values;
    return true;
  }

  /// Run a step on the search's rows, again if the device has run it on its own choice.
  static void feed(const std::vector<std::int32_t>& tokens, SpeculativeState& state) {
    const Profile& profile = state.device->profile;
    const std::size_t beams = size(profile.beams), rows = size(profile.batch) * beams;
    const std::size_t width = tokens.size() / state.sentences;
    const std::vector<float> sums = sums_of(tokens, state);
    NextInputs& choice = state.choice;
    choice.tokens.assign(rows, 0);
    choice.values.assign(rows, dead);
    choice.positions.assign(rows, static_cast<std::int32_t>(std::min(state.position, profile.capacity - 1)));
    choice.parents.resize(rows);
    for (std::size_t row = 0; row < rows; ++row) choice.parents[row] = static_cast<std::int32_t>(row);
    state.places.resize(tokens.size());
    for (std::size_t b = 0; b < state.sentences; ++b) {
      const std::size_t first = state.sentence(b) * beams;
      for (std::size_t k = 0; k < beams; ++k) {
        const std::size_t from = b * width + std::min(k, width - 1);  // rows beyond the search's repeat its last
        choice.tokens[first + k] = tokens[from];
        choice.parents[first + k] = state.parents[from];
        if (k >= width) continue;
        choice.values[first + k] = sums[from];
        state.places[from] = static_cast<std::int32_t>(first + k);
      }
    }
    state.device->feed(choice, state.position);
    state.device->issue(state.position);
    state.sums = choice.values;
  }

  /// Sums of log-probabilities of the search's rows (B, K), for tokens among the best that the step returned.
  static std::vector<float> sums_of(const std::vector<std::int32_t>& tokens, const SpeculativeState& state) {
    const std::size_t best = size(state.device->best()), width = tokens.size() / state.sentences;
    std::vector<float> sums(tokens.size(), 0.0F);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const std::int32_t parent = state.parents[i];
      if (state.recorded) {
        const auto ids = state.record.ids.begin() + static_cast<std::ptrdiff_t>(size(parent) * best);
        const auto found = std::find(ids, ids + static_cast<std::ptrdiff_t>(best), tokens[i]);
        const auto rank = static_cast<std::size_t>(found - ids);
        sums[i] = rank == best ? dead : state.sums[size(parent)] + state.record.scores[size(parent) * best + rank];
      }
      // A search narrower than its batch repeats a row; only the first copy may give candidates.
      if (i % width && tokens[i] == tokens[i - 1] && parent == state.parents[i - 1]) sums[i] = dead;
    }
    return sums;
  }

  /// Copy the scores of the search's rows, which are at `places` on the device.
  void copy_scores(const SpeculativeState& state, bool full, Scores& scores) const {
    const std::size_t best = size(state.device->best()), vocab = size(model().tgt_vocab), rows = state.places.size();
    scores.best = state.device->best();
    scores.ids.resize(rows * best);
    scores.scores.resize(rows * best);
    scores.attention.clear();
    scores.log_probs.resize(full ? rows * vocab : 0);
    const std::vector<float>* every = full ? &state.device->log_probs() : nullptr;
    for (std::size_t i = 0; i < rows; ++i) {
      const std::size_t row = size(state.places[i]);
      std::copy_n(&state.record.ids[row * best], best, &scores.ids[i * best]);
      std::copy_n(&state.record.scores[row * best], best, &scores.scores[i * best]);
      if (every) std::copy_n(&(*every)[row * vocab], vocab, &scores.log_probs[i * vocab]);
    }
  }
};

}  // namespace

std::unique_ptr<Engine> make_speculative(std::shared_ptr<const TrtModel> model) {
  return std::make_unique<SpeculativeEngine>(std::move(model));
}

}  // namespace tformer
