// Kinds inplace/1 and short/1: buffers that stay, written in place; a step makes and copies nothing but its few scores.
#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

#include "errors.hpp"
#include "ort/engines.hpp"

namespace tformer {
namespace {

constexpr std::int64_t first_capacity = 32;  // positions that a new cache has room for; it doubles when they are full
constexpr double sparse = 0.75;  // with fewer sentences than this share, a copy costs less than those that have ended
constexpr std::size_t list_unit = 64;  // lists are filled up to a multiple of this

std::size_t size(std::int64_t number) { return static_cast<std::size_t>(number); }

/// What the sentences of a batch may use, and what the step needs to score that.
struct Listed {
  std::vector<std::int32_t> ids;     // in order
  std::vector<std::int32_t> filled;  // filled up
  std::vector<float> mask;           // (B, filled): 0 where a sentence may use a token, else -inf
  std::vector<Ort::Value> rows;      // what `short_rows` gives
  Ort::Value filled_value{nullptr};
};

struct InPlaceState : State {
  std::int64_t batch = 0, beams = 1, capacity = first_capacity;
  std::vector<std::int32_t> src_lengths;  // (B)
  std::vector<Ort::Value> cross;
  std::vector<Buffer> past;               // 2L of (B*K, H, M, D)
  std::vector<std::int32_t> slots;        // where the sentences of the next step lie in the buffers
  std::vector<std::int32_t> tokens;       // (B, K)
  std::vector<std::int32_t> written_by;   // (B, K, M): the beam that wrote each position of a beam's target
  std::vector<std::int32_t> position = {0};
  std::unique_ptr<Listed> listed;
  // Bound: made anew when sizes change.
  std::vector<Ort::Value> values;
  Feed feed[2];                         // without and with all log-probabilities
  std::vector<std::int32_t> top_ids;    // (B*K, k)
  std::vector<float> top_scores, log_probs;
  bool bound = false;
};

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
    auto state = std::make_unique<InPlaceState>();
    std::vector<std::int32_t> ids = src_ids;
    state->src_lengths = src_lengths;
    state->cross = tformer::encode(*graphs_, ids, state->src_lengths);
    state->batch = static_cast<std::int64_t>(src_lengths.size());
    make_buffers(*state);
    if (graphs_->shortlist()) state->listed = list_of(src_ids, src_lengths, outlook);
    return state;
  }

  void step(const std::vector<std::int32_t>& tokens, State& opaque, bool full, bool attention,
            Scores& scores) override {
    auto& state = static_cast<InPlaceState&>(opaque);
    check_step(static_cast<std::int64_t>(tokens.size() / state.slots.size()), state.position[0], limits());
    if (attention) {
      throw Error(Status::limit,
                  "this variant does not return attention: use the standard graphs of fp32-attention");
    }
    if (state.position[0] == state.capacity) move(state, state.slots, 2 * state.capacity, nullptr);
    if (!state.bound) bind(state);
    if (full && state.log_probs.empty()) bind_log_probs(state);
    const auto beams = size(state.beams);
    for (std::size_t i = 0; i < state.slots.size(); ++i) {
      std::copy_n(&tokens[i * beams], beams, &state.tokens[size(state.slots[i]) * beams]);
    }
    graphs_->run(Graphs::step, state.feed[full]);
    ++state.position[0];
    copy_scores(state, full, scores);
  }

  void reorder(State& opaque, const std::vector<std::int32_t>& parents,
               const std::vector<std::int32_t>& sentences) override {
    auto& state = static_cast<InPlaceState&>(opaque);
    std::vector<std::int32_t> slots;
    for (const std::int32_t sentence : sentences) slots.push_back(state.slots[size(sentence)]);
    const auto width = static_cast<std::int64_t>(parents.size() / slots.size());
    if (width != state.beams) {
      const std::vector<std::int32_t> histories = renamed(state, parents, slots, width);
      move(state, slots, state.capacity, &histories, width);
      return;
    }
    if (width > 1) {
      const std::vector<std::int32_t> histories = renamed(state, parents, slots, width);
      const std::size_t filled = size(state.position[0]), rows = size(width);
      for (std::size_t i = 0; i < slots.size() * rows; ++i) {
        const std::size_t row = size(slots[i / rows]) * rows + i % rows;
        std::copy_n(histories.data() + i * filled, filled, &state.written_by[row * size(state.capacity)]);
      }
    }
    if (static_cast<double>(slots.size()) < sparse * static_cast<double>(state.batch)) {
      move(state, slots, state.capacity, nullptr);
    } else {
      state.slots = std::move(slots);
    }
  }

  std::vector<std::vector<float>> cross_keys_values(const State& opaque) const override {
    return copies(static_cast<const InPlaceState&>(opaque).cross);
  }

 private:
  std::shared_ptr<const Graphs> graphs_;
  std::vector<std::string> cross_, past_, present_, listed_names_;

  std::int64_t best_of(std::int64_t beams) const {
    const std::int64_t top_k = graphs_->recipe().top_k;
    return top_k ? top_k : 2 * beams;
  }

  /// Buffers of the state's sizes in which each row has written what it has, and every sentence is asked for.
  void make_buffers(InPlaceState& state) const {
    const Model& model = graphs_->model();
    const std::int64_t rows = state.batch * state.beams;
    state.past.clear();
    for (std::size_t i = 0; i < past_.size(); ++i) {
      state.past.emplace_back(std::vector<std::int64_t>{rows, model.heads, state.capacity, model.head_dim});
    }
    state.slots.resize(size(state.batch));
    std::iota(state.slots.begin(), state.slots.end(), 0);
    state.tokens.assign(size(rows), 0);
    state.written_by.resize(size(rows * state.capacity));
    for (std::size_t row = 0; row < size(rows); ++row) {
      std::fill_n(&state.written_by[row * size(state.capacity)], size(state.capacity),
                  static_cast<std::int32_t>(row % size(state.beams)));
    }
    state.bound = false;
  }

  /// (B', K', T) which beam wrote each position of what row i continues, parents[i].
  static std::vector<std::int32_t> renamed(const InPlaceState& state, const std::vector<std::int32_t>& parents,
                                           const std::vector<std::int32_t>& slots, std::int64_t width) {
    const std::size_t filled = size(state.position[0]), beams = size(state.beams);
    std::vector<std::int32_t> histories(parents.size() * filled);
    for (std::size_t i = 0; i < parents.size(); ++i) {
      const std::size_t slot = size(slots[i / size(width)]), beam = size(parents[i]) % beams;
      std::copy_n(&state.written_by[(slot * beams + beam) * size(state.capacity)], filled,
                  histories.data() + i * filled);
    }
    return histories;
  }

  /// Move the sentences at `slots` to new buffers. `histories` (B, K, T): their beams become `beams`, so each gets the
  /// history that it names.
  void move(InPlaceState& state, const std::vector<std::int32_t> slots, std::int64_t capacity,
            const std::vector<std::int32_t>* histories, std::int64_t beams = 0) const {
    const std::size_t filled = size(state.position[0]), width = size(state.beams), room = size(state.capacity);
    const bool fewer = !all_in_order(slots, size(state.batch));
    const std::vector<Buffer> old = std::move(state.past);
    const std::vector<std::int32_t> written_by = std::move(state.written_by);
    state.batch = static_cast<std::int64_t>(slots.size());
    state.beams = histories ? beams : state.beams;
    state.capacity = capacity;
    make_buffers(state);
    const std::size_t now = size(state.beams), heads = size(graphs_->model().heads), rows = slots.size() * now;
    const std::size_t place = size(graphs_->model().head_dim);
    for (std::size_t row = 0; row < rows; ++row) {
      const std::size_t first = size(slots[row / now]) * width;  // of the sentence's old rows
      if (!histories) {
        std::copy_n(&written_by[(first + row % now) * room], filled, &state.written_by[row * size(capacity)]);
      }
      for (std::size_t i = 0; i < old.size(); ++i) {
        for (std::size_t head = 0; head < heads; ++head) {
          float* to = state.past[i].data() + (row * heads + head) * size(capacity) * place;
          if (!histories) {
            const float* from = old[i].data() + ((first + row % now) * heads + head) * room * place;
            std::memcpy(to, from, filled * place * sizeof(float));
            continue;
          }
          for (std::size_t at = 0; at < filled; ++at) {
            const std::size_t from = ((first + size((*histories)[row * filled + at])) * heads + head) * room + at;
            std::memcpy(to + at * place, old[i].data() + from * place, place * sizeof(float));
          }
        }
      }
    }
    if (fewer) keep_sentences(state, slots);
  }

  static void keep_sentences(InPlaceState& state, const std::vector<std::int32_t>& slots) {
    std::vector<std::int32_t> lengths;
    for (const std::int32_t slot : slots) lengths.push_back(state.src_lengths[size(slot)]);
    state.src_lengths = std::move(lengths);
    state.cross = gathered(state.cross, slots);
    if (!state.listed) return;
    const std::size_t width = state.listed->filled.size();
    std::vector<float> mask;
    for (const std::int32_t slot : slots) {
      const float* own = state.listed->mask.data() + size(slot) * width;
      mask.insert(mask.end(), own, own + width);
    }
    state.listed->mask = std::move(mask);
  }

  /// The tokens that any sentence may use, in order, and their part of the output's table.
  std::unique_ptr<Listed> list_of(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& lengths,
                                  const Outlook& outlook) const {
    const std::size_t vocab = size(model().tgt_vocab), batch = lengths.size(), width = src_ids.size() / batch;
    std::vector<std::uint8_t> allowed(batch * vocab, 0), any(vocab, 0);
    for (std::size_t b = 0; b < batch; ++b) {
      std::uint8_t* own = &allowed[b * vocab];
      graphs_->shortlist()->allow(&src_ids[b * width], size(lengths[b]), own);
      if (b < outlook.required.size()) {
        for (const std::int32_t id : outlook.required[b]) own[id] = 1;
      }
      for (std::size_t id = 0; id < vocab; ++id) any[id] |= own[id];
    }
    auto listed = std::make_unique<Listed>();
    for (std::size_t id = 0; id < vocab; ++id) {
      if (any[id]) listed->ids.push_back(static_cast<std::int32_t>(id));
    }
    const std::size_t least = std::max(listed->ids.size(), size(best_of(limits().beams)));
    const std::size_t count = (least + list_unit - 1) / list_unit * list_unit;
    listed->filled = listed->ids;
    listed->filled.resize(count, 0);
    listed->mask.assign(batch * count, -std::numeric_limits<float>::infinity());
    for (std::size_t b = 0; b < batch; ++b) {
      for (std::size_t i = 0; i < listed->ids.size(); ++i) {
        if (allowed[b * vocab + size(listed->ids[i])]) listed->mask[b * count + i] = 0;
      }
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

  /// Name every input and output of the step but all log-probabilities.
  void bind(InPlaceState& state) const {
    const std::int64_t rows = state.batch * state.beams, best = best_of(state.beams);
    state.top_ids.resize(size(rows * best));
    state.top_scores.resize(state.top_ids.size());
    state.log_probs.clear();
    state.values.clear();
    state.values.reserve(8);
    const auto keep = [&state](Ort::Value value) -> const Ort::Value& {
      return state.values.emplace_back(std::move(value));
    };
    Feed feed;
    feed.input_names = {"tokens", "position", "written_by", "src_lengths"};
    feed.inputs = {keep(tensor(state.tokens, {state.batch, state.beams})), keep(tensor(state.position, {1})),
                   keep(tensor(state.written_by, {state.batch, state.beams, state.capacity})),
                   keep(tensor(state.src_lengths, {state.batch}))};
    for (std::size_t i = 0; i < cross_.size(); ++i) feed.input(cross_[i], state.cross[i]);
    for (std::size_t i = 0; i < past_.size(); ++i) feed.input(past_[i], state.past[i].value());
    if (state.listed) {
      Listed& listed = *state.listed;
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
    const auto width = static_cast<std::int64_t>(scored);
    state.log_probs.resize(size(rows * width));
    state.values.push_back(tensor(state.log_probs, {rows, width}));
    state.feed[1].output_names.push_back("log_probs");
    state.feed[1].outputs.push_back(state.values.back());
  }

  /// Of the sentences that are still asked for.
  void copy_scores(const InPlaceState& state, bool full, Scores& scores) const {
    const std::size_t beams = size(state.beams), best = state.top_ids.size() / state.tokens.size();
    const std::size_t count = state.slots.size(), vocab = size(model().tgt_vocab);
    scores.best = static_cast<std::int64_t>(best);
    scores.ids.resize(count * beams * best);
    scores.scores.resize(scores.ids.size());
    scores.attention.clear();
    scores.log_probs.resize(full ? count * beams * vocab : 0);
    if (full && state.listed) {
      std::fill(scores.log_probs.begin(), scores.log_probs.end(), -std::numeric_limits<float>::infinity());
    }
    const std::size_t width = full ? state.log_probs.size() / state.tokens.size() : 0;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t slot = size(state.slots[i]), own = beams * best;
      std::copy_n(&state.top_ids[slot * own], own, &scores.ids[i * own]);
      std::copy_n(&state.top_scores[slot * own], own, &scores.scores[i * own]);
      for (std::size_t beam = 0; full && beam < beams; ++beam) {
        const float* from = &state.log_probs[(slot * beams + beam) * width];
        float* to = &scores.log_probs[(i * beams + beam) * vocab];
        if (!state.listed) {
          std::copy_n(from, vocab, to);
          continue;
        }
        const std::vector<std::int32_t>& ids = state.listed->ids;
        for (std::size_t at = 0; at < ids.size(); ++at) to[ids[at]] = from[at];
      }
    }
  }
};

}  // namespace

std::unique_ptr<Engine> make_in_place(std::shared_ptr<const Graphs> graphs) {
  return std::make_unique<InPlaceEngine>(std::move(graphs));
}

}  // namespace tformer
