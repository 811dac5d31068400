// The state of in-place steps: buffers of a fixed capacity, and which sentence is in which slot.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine.hpp"
#include "ort/buffers.hpp"
#include "ort/graphs.hpp"
#include "spec.hpp"

namespace tformer {

/// The shortlist of a batch, and the step's inputs for it.
struct ShortlistState {
  std::vector<std::int32_t> ids;     // in order
  std::vector<std::int32_t> filled;  // padded to a multiple of `list_unit`
  std::vector<float> mask;           // (B, filled): 0 where a sentence may use a token, else -inf
  std::vector<Ort::Value> rows;      // what `short_rows` gives
  Ort::Value filled_value{nullptr};
};

/// How sentences move to new buffers.
struct Move {
  std::int64_t capacity;
  std::int64_t first = 0;                    // positions before it are dropped
  std::int64_t beams = 0;                    // new rows per sentence, 0: unchanged; then
  std::vector<std::int32_t> histories = {};  // (B, K, T) the beam that wrote each position that a row continues
  std::int64_t spare = 0;                    // further sentences to have room for,
  std::int64_t src_len = 0;                  // with sources up to this
};

struct InPlaceState : State {
  /// New sentences with one row each, and sources of these lengths.
  InPlaceState(const Model& of, std::shared_ptr<BufferPool> memory, std::vector<std::int32_t> lengths);

  std::int64_t batch, beams = 1, capacity = spec::first_capacity;
  std::int64_t longest = 0;               // position of the longest target
  std::vector<std::int32_t> src_lengths;  // (B)
  std::vector<Ort::Value> cross;
  std::vector<Buffer> past;               // 2L of (B*K, H, M, D); of recurrent cells L of (B*K, d)
  std::vector<std::int32_t> slots;        // slots of the next step's sentences in the buffers
  std::vector<std::int32_t> tokens;       // (B, K)
  std::vector<std::int32_t> written_by;   // (B, K, M): the beam that wrote each position of a beam's target
  std::vector<std::int32_t> position = {0};  // the buffer position that the next step writes, for all sentences
  std::vector<std::int32_t> positions;    // (B, K) position in each target, once a sentence has joined; 0 if free
  std::unique_ptr<ShortlistState> listed;
  // Bound inputs and outputs: remade when sizes change.
  std::vector<Ort::Value> values;
  Feed feed[2];                         // without and with all log-probabilities
  std::vector<std::int32_t> top_ids;    // (B*K, k)
  std::vector<float> top_scores;
  std::optional<Buffer> log_probs;  // (B*K, V)
  bool bound = false;
  bool changing = false;  // also after a change that failed, as memory ran out: nothing of the caches may be read

  bool lost() const override { return changing; }
  /// See `Engine::reorder`.
  void reorder(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& sentences);
  /// Make room for another position: drop those before all targets, or, if these are fewer than half, double the
  /// capacity.
  void make_room();
  /// Put new sentences into free slots: their sources' lengths, and the encoder's output (B, H, S, D).
  void admit(const std::vector<std::int32_t>& lengths, const std::vector<Ort::Value>& own);

 private:
  /// The buffers before a move, and their sizes.
  struct Old {
    std::vector<Buffer> past;
    std::vector<std::int32_t> written_by;
    std::size_t batch, beams, capacity;
  };

  const Model& model_;
  std::shared_ptr<BufferPool> pool_;
  std::vector<std::int32_t> histories_;  // (K, T), of one sentence

  void make_buffers();
  void rename(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& kept);
  std::vector<std::int32_t> renamed(const std::vector<std::int32_t>& parents,
                                    const std::vector<std::int32_t>& kept) const;
  /// Move the sentences in slots `kept` to new buffers. By value, as `slots` may be passed.
  void move(std::vector<std::int32_t> kept, const Move& to);
  void copy_caches(const Old& old, const std::vector<std::int32_t>& kept, const Move& to);
  void keep_sentences(const std::vector<std::int32_t>& kept, const Move& to);
  void keep_positions(const std::vector<std::int32_t>& kept);
  void fill(std::size_t slot, const std::vector<Ort::Value>& own, std::size_t entry);
};

}  // namespace tformer
