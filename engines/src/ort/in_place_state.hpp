// What steps in place carry: buffers of a fixed capacity, and which sentences lie where in them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine.hpp"
#include "ort/buffers.hpp"
#include "ort/graphs.hpp"

namespace tformer {

constexpr std::int64_t first_capacity = 32;  // positions that a new cache has room for; it doubles when they are full

/// What the sentences of a batch may use, and what the step needs to score that.
struct Listed {
  std::vector<std::int32_t> ids;     // in order
  std::vector<std::int32_t> filled;  // filled up
  std::vector<float> mask;           // (B, filled): 0 where a sentence may use a token, else -inf
  std::vector<Ort::Value> rows;      // what `short_rows` gives
  Ort::Value filled_value{nullptr};
};

/// Where sentences move to.
struct Move {
  std::int64_t capacity;
  std::int64_t first = 0;                    // places before it are left behind
  std::int64_t beams = 0;                    // rows of a sentence where they change in number; then
  std::vector<std::int32_t> histories = {};  // (B, K, T), who wrote what each row continues
  std::int64_t spare = 0;                    // sentences to have room for besides,
  std::int64_t src_len = 0;                  // with sources up to this
};

struct InPlaceState : State {
  /// Sentences with one row each and sources of these lengths.
  InPlaceState(const Model& of, std::shared_ptr<Pool> memory, std::vector<std::int32_t> lengths);

  std::int64_t batch, beams = 1, capacity = first_capacity;
  std::int64_t longest = 0;               // the position of the longest target
  std::vector<std::int32_t> src_lengths;  // (B)
  std::vector<Ort::Value> cross;
  std::vector<Buffer> past;               // 2L of (B*K, H, M, D)
  std::vector<std::int32_t> slots;        // where the sentences of the next step lie in the buffers
  std::vector<std::int32_t> tokens;       // (B, K)
  std::vector<std::int32_t> written_by;   // (B, K, M): the beam that wrote each position of a beam's target
  std::vector<std::int32_t> position = {0};  // the place in the buffers that the next step writes, of every sentence
  std::vector<std::int32_t> positions;    // (B, K): that of each target, once a sentence has joined others; 0 if free
  std::unique_ptr<Listed> listed;
  // Bound: made anew when sizes change.
  std::vector<Ort::Value> values;
  Feed feed[2];                         // without and with all log-probabilities
  std::vector<std::int32_t> top_ids;    // (B*K, k)
  std::vector<float> top_scores;
  std::optional<Buffer> log_probs;  // (B*K, V)
  bool bound = false;

  /// See `Engine::reorder`.
  void reorder(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& sentences);
  /// Room for another position. Places before all targets are given up; where fewer than half are such, there will be
  /// twice as many.
  void make_room();
  /// Sentences behind the others, in places that are free: their sources' lengths, and the encoder's output (B, H, S, D).
  void admit(const std::vector<std::int32_t>& lengths, const std::vector<Ort::Value>& own);

 private:
  /// Buffers that are left, and their sizes.
  struct Old {
    std::vector<Buffer> past;
    std::vector<std::int32_t> written_by;
    std::size_t batch, beams, capacity;
  };

  const Model& model_;
  std::shared_ptr<Pool> pool_;
  std::vector<std::int32_t> histories_;  // (K, T), of one sentence

  void make_buffers();
  void rename(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& kept);
  std::vector<std::int32_t> renamed(const std::vector<std::int32_t>& parents,
                                    const std::vector<std::int32_t>& kept) const;
  /// Move the sentences at `kept` to new buffers. By value, as that may be `slots`.
  void move(std::vector<std::int32_t> kept, const Move& to);
  void copy_caches(const Old& old, const std::vector<std::int32_t>& kept, const Move& to);
  void keep_sentences(const std::vector<std::int32_t>& kept, const Move& to);
  void keep_positions(const std::vector<std::int32_t>& kept);
  void fill(std::size_t slot, const std::vector<Ort::Value>& own, std::size_t entry);
};

}  // namespace tformer
