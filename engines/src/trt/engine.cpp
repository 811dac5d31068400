// The engine over TensorRT plans: the GPU runs steps ahead of the search.
//
// Each step chooses the inputs of the next one, so that the GPU need not wait for the search. The search still decides:
// it gets every step's scores, one step late, and where it chooses other rows than the GPU did, that step runs again.
// Sentences that join take free slots of the device. It has fixed sizes, so it encodes all of its slots again, and where
// it is too small, all move to a larger one.
#include <algorithm>
#include <optional>

#include "errors.hpp"
#include "spec.hpp"
#include "trt/model.hpp"

namespace tformer {
namespace {

using spec::dead;

/// A device, and the sentence in each of its slots.
struct Slots {
  Slots(std::unique_ptr<TrtDevice> taken, std::int32_t pad_id)
      : device(std::move(taken)), src_ids(size(device->profile.batch * device->profile.src_len), pad_id),
        src_lengths(size(device->profile.batch), 1), first_steps(size(device->profile.batch), 0) {}

  std::unique_ptr<TrtDevice> device;
  std::vector<std::int32_t> src_ids;      // (B, S)
  std::vector<std::int32_t> src_lengths;  // slots without a sentence have one token
  std::vector<std::int64_t> first_steps;  // the step at which each sentence began

  const Profile& profile() const { return device->profile; }
  std::int32_t* source(std::size_t slot) { return &src_ids[slot * size(profile().src_len)]; }
};

struct SpeculativeState final : State {
  SpeculativeState(std::shared_ptr<const TrtModel> owner, Slots taken)
      : model(std::move(owner)), slots(std::move(taken)) {}
  ~SpeculativeState() override { give_back(); }

  std::shared_ptr<const TrtModel> model;
  Slots slots;                        // without a device: it has failed
  std::size_t sentences = 0;          // B of the search
  std::vector<std::int32_t> parents;  // (B, K) device rows that the next step's rows continue
  std::int64_t steps = 0;             // the device may run ahead of the search up to this one
  std::int64_t position = 0;          // steps done
  bool speculative = false;           // the device has been given the next step too, by its own choice
  std::size_t recorded = 0;           // best tokens of a row in `record`; 0: there was no step
  Record record;                      // of the last step
  std::vector<float> sums;            // (device rows) `values` that the last step was fed
  int misses = 0;
  NextInputs choice;                  // reused, so that no step allocates
  std::vector<std::int32_t> places;   // (B, K) device rows of the search's rows

  bool lost() const override { return !slots.device; }
  TrtDevice& device() const { return *slots.device; }
  void give_back() noexcept {
    if (slots.device) model->give_back(std::move(slots.device));
  }
  std::size_t width() const { return sentences ? parents.size() / sentences : 1; }
  /// The slot of a sentence.
  std::size_t slot(std::size_t b) const { return size(parents[b * width()] / slots.profile().beams); }
  /// Positions of the longest target.
  std::int64_t longest() const {
    std::int64_t most = 0;
    for (std::size_t b = 0; b < sentences; ++b) most = std::max(most, position - slots.first_steps[slot(b)]);
    return most;
  }
};

class SpeculativeEngine final : public Engine {
 public:
  explicit SpeculativeEngine(std::shared_ptr<const TrtModel> model) : model_(std::move(model)) {}

  const ModelInfo& model() const override { return model_->model(); }
  const Limits& limits() const override { return model_->limits(); }
  bool attention() const override { return false; }
  std::int64_t best(std::int64_t, const State& state) const override {
    return static_cast<const SpeculativeState&>(state).device().best();
  }

  std::unique_ptr<State> encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                                const Outlook& outlook) override {
    check_request(src_ids, src_lengths, model(), limits());
    const std::size_t batch = src_lengths.size();
    auto state = std::make_unique<SpeculativeState>(model_, new_slots(wanted(batch, src_ids.size() / batch, outlook)));
    fill_or_lose(*state, src_ids, src_lengths, outlook);
    return state;
  }

  bool admits() const override { return true; }
  void admit(State& opaque, const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
             const Outlook& outlook) override {
    auto& state = static_cast<SpeculativeState&>(opaque);
    check_request(src_ids, src_lengths, model(), limits());
    const std::size_t total = state.sentences + src_lengths.size();
    if (static_cast<std::int64_t>(total) > limits().batch) {
      throw Error(Status::limit, spec::too_many_joined(static_cast<std::int64_t>(total), limits().batch));
    }
    std::size_t widest = src_ids.size() / src_lengths.size();
    for (std::size_t b = 0; b < state.sentences; ++b) {
      widest = std::max(widest, static_cast<std::size_t>(state.slots.src_lengths[state.slot(b)]));
    }
    Profile sizes = wanted(total, widest, outlook);
    sizes.beams = std::max(sizes.beams, static_cast<std::int64_t>(state.width()));
    std::optional<Slots> larger;
    if (!state.slots.profile().holds(sizes)) larger = new_slots(sizes);  // throws before anything has changed
    if (larger) move(state, std::move(*larger));
    fill_or_lose(state, src_ids, src_lengths, outlook);
  }

  void step(const std::vector<std::int32_t>& tokens, State& opaque, bool full, bool attention,
            Scores& scores) override {
    auto& state = static_cast<SpeculativeState&>(opaque);
    const std::int64_t longest = state.longest();
    require_room(state, tokens.size() / state.sentences, longest, attention);
    if (!state.speculative || !chosen(tokens, state)) feed(tokens, state);
    const std::int64_t following = state.position + 1;
    state.speculative = !full && state.misses < spec::most_misses && following < state.steps &&
                        longest + 1 < state.slots.profile().capacity;
    if (state.speculative) state.device().issue(following);
    state.device().read(state.position, state.record);
    state.recorded = size(state.device().best());
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
    return state.device().cross();
  }

 private:
  std::shared_ptr<const TrtModel> model_;

  Profile wanted(std::size_t batch, std::size_t src_tokens, const Outlook& outlook) const {
    const std::int64_t most = limits().tgt_tokens;
    return {static_cast<std::int64_t>(batch), outlook.beams ? outlook.beams : limits().beams,
            static_cast<std::int64_t>(src_tokens), std::min(outlook.tokens ? outlook.tokens : most, most)};
  }

  Slots new_slots(const Profile& sizes) const { return {model_->take(sizes), model().pad_id}; }

  /// Put sentences into free slots, and encode; where that fails the device is freed.
  void fill_or_lose(SpeculativeState& state, const std::vector<std::int32_t>& src_ids,
                    const std::vector<std::int32_t>& src_lengths, const Outlook& outlook) const {
    try {
      fill(state, src_ids, src_lengths, outlook);
    } catch (...) {
      state.slots.device.reset();
      throw;
    }
  }

  void fill(SpeculativeState& state, const std::vector<std::int32_t>& src_ids,
            const std::vector<std::int32_t>& src_lengths, const Outlook& outlook) const {
    Slots& slots = state.slots;
    const Profile& profile = slots.profile();
    const std::size_t count = src_lengths.size(), width = src_ids.size() / count, rows = state.width();
    std::vector<bool> taken(size(profile.batch), false);
    for (std::size_t b = 0; b < state.sentences; ++b) taken[state.slot(b)] = true;
    std::size_t slot = 0;
    for (std::size_t b = 0; b < count; ++b, ++slot) {
      while (taken[slot]) ++slot;
      std::fill_n(slots.source(slot), size(profile.src_len), model().pad_id);
      std::copy_n(&src_ids[b * width], width, slots.source(slot));
      slots.src_lengths[slot] = src_lengths[b];
      slots.first_steps[slot] = state.position;
      state.parents.insert(state.parents.end(), rows, static_cast<std::int32_t>(slot * size(profile.beams)));
    }
    state.sentences += count;
    slots.device->encode(slots.src_ids, slots.src_lengths, outlook);
    state.speculative = false;
    state.steps = outlook.drawn ? 0 : state.position + (outlook.tokens ? outlook.tokens : limits().tgt_tokens);
  }

  /// Move the sentences, with what the next step reads of them, to another device, which encodes them later. Where that
  /// fails, the state is as it was.
  static void move(SpeculativeState& state, Slots slots) {
    const Profile& profile = slots.profile();
    const std::size_t beams = size(profile.beams), width = state.width(), rows = size(profile.batch) * beams;
    std::vector<std::int32_t> own;  // (B, K) rows on the new device
    for (std::size_t b = 0; b < state.sentences; ++b) {
      const std::size_t from = state.slot(b);
      std::copy_n(state.slots.source(from), state.slots.src_lengths[from], slots.source(b));
      slots.src_lengths[b] = state.slots.src_lengths[from];
      slots.first_steps[b] = state.slots.first_steps[from];
      for (std::size_t k = 0; k < width; ++k) own.push_back(static_cast<std::int32_t>(b * beams + k));
    }
    if (const std::size_t best = state.recorded) {
      slots.device->take_over(state.device(), state.parents, own, state.longest(), state.position);
      Record record;
      std::vector<float> sums(rows, dead);
      record.ids.resize(rows * best);
      record.scores.resize(rows * best);
      for (std::size_t i = 0; i < own.size(); ++i) {
        const std::size_t from = size(state.parents[i]), to = size(own[i]);
        std::copy_n(&state.record.ids[from * best], best, &record.ids[to * best]);
        std::copy_n(&state.record.scores[from * best], best, &record.scores[to * best]);
        sums[to] = state.sums[from];
      }
      state.record = std::move(record);
      state.sums = std::move(sums);
    }
    state.give_back();
    state.slots = std::move(slots);
    state.parents = std::move(own);
    state.speculative = false;
  }

  static void require_room(const SpeculativeState& state, std::size_t width, std::int64_t longest, bool attention) {
    const Profile& profile = state.slots.profile();
    const auto refuse = [](const std::string& message) { throw Error(Status::limit, message); };
    if (static_cast<std::int64_t>(width) > profile.beams) {
      refuse(std::to_string(width) + " beams exceed the " + std::to_string(profile.beams) +
             " that were announced: " + profile.shown());
    }
    if (attention) refuse(spec::no_attention);
    if (longest == profile.capacity) {
      refuse("decoding step " + std::to_string(longest + 1) + " is beyond what was announced: " + profile.shown());
    }
  }

  /// Whether the device's own choice has every row that the search wants, in any order; `places` are then those rows.
  static bool chosen(const std::vector<std::int32_t>& tokens, SpeculativeState& state) {
    const NextInputs& own = state.record.next;
    const std::size_t beams = size(state.slots.profile().beams), width = tokens.size() / state.sentences;
    state.places.resize(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const std::size_t first = state.slot(i / width) * beams;
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
    const Profile& profile = state.slots.profile();
    const std::size_t beams = size(profile.beams), rows = size(profile.batch) * beams;
    const std::size_t width = tokens.size() / state.sentences;
    const std::vector<float> sums = sums_of(tokens, state);
    NextInputs& choice = state.choice;
    choice.tokens.assign(rows, 0);
    choice.values.assign(rows, dead);
    choice.positions.resize(rows);
    choice.parents.resize(rows);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::int64_t position = state.position - state.slots.first_steps[row / beams];
      choice.positions[row] = static_cast<std::int32_t>(std::min(position, profile.capacity - 1));
      choice.parents[row] = static_cast<std::int32_t>(row);
    }
    state.places.resize(tokens.size());
    for (std::size_t b = 0; b < state.sentences; ++b) {
      const std::size_t first = state.slot(b) * beams;
      for (std::size_t k = 0; k < beams; ++k) {
        const std::size_t from = b * width + std::min(k, width - 1);  // rows beyond the search's repeat its last
        choice.tokens[first + k] = tokens[from];
        choice.parents[first + k] = state.parents[from];
        if (k >= width) continue;
        choice.values[first + k] = sums[from];
        state.places[from] = static_cast<std::int32_t>(first + k);
      }
    }
    state.device().feed(choice, state.position);
    state.device().issue(state.position);
    state.sums = choice.values;
  }

  /// Sums of log-probabilities of the search's rows (B, K), for tokens among the best that the step returned.
  static std::vector<float> sums_of(const std::vector<std::int32_t>& tokens, const SpeculativeState& state) {
    const std::size_t best = state.recorded, width = tokens.size() / state.sentences;
    std::vector<float> sums(tokens.size(), 0.0F);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const std::int32_t parent = state.parents[i];
      if (state.slots.first_steps[state.slot(i / width)] < state.position) {
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
    const std::size_t best = state.recorded, vocab = size(model().tgt_vocab), rows = state.places.size();
    scores.best = state.device().best();
    scores.ids.resize(rows * best);
    scores.scores.resize(rows * best);
    scores.attention.clear();
    scores.log_probs.resize(full ? rows * vocab : 0);
    const std::vector<float>* every = full ? &state.device().log_probs() : nullptr;
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
