#include "ort/in_place_state.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ort/engines.hpp"
#include "spec.hpp"

namespace tformer {
namespace {

/// S of a tensor (B, H, S, D).
std::int64_t src_len_of(const Ort::Value& cross) { return cross.GetTensorTypeAndShapeInfo().GetShape()[2]; }

}  // namespace

InPlaceState::InPlaceState(const Model& of, std::shared_ptr<BufferPool> memory, std::vector<std::int32_t> lengths)
    : batch(static_cast<std::int64_t>(lengths.size())), src_lengths(std::move(lengths)), model_(of),
      pool_(std::move(memory)) {
  make_buffers();
}

/// Buffers of the state's sizes, in which every slot is in use and each row has written its own history.
void InPlaceState::make_buffers() {
  const std::int64_t rows = batch * beams;
  past.clear();
  for (std::int64_t i = 0; model_.recurrent && i < model_.decoder_layers; ++i) {
    past.emplace_back(std::vector<std::int64_t>{rows, model_.d_model}, pool_);
    std::fill_n(past.back().data(), size(rows * model_.d_model), 0.0F);
  }
  for (std::int64_t i = 0; !model_.recurrent && i < 2 * model_.decoder_layers; ++i) {
    past.emplace_back(std::vector<std::int64_t>{rows, model_.heads, capacity, model_.head_dim}, pool_);
  }
  slots.resize(size(batch));
  std::iota(slots.begin(), slots.end(), 0);
  tokens.assign(size(rows), 0);
  written_by.resize(size(rows * capacity));
  for (std::size_t row = 0; row < size(rows); ++row) {
    std::fill_n(&written_by[row * size(capacity)], size(capacity), static_cast<std::int32_t>(row % size(beams)));
  }
  bound = false;
}

void InPlaceState::reorder(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& sentences) {
  const bool all = all_in_order(sentences, slots.size());
  std::vector<std::int32_t> fewer;
  for (std::size_t i = 0; !all && i < sentences.size(); ++i) fewer.push_back(slots[size(sentences[i])]);
  const std::vector<std::int32_t>& kept = all ? slots : fewer;
  const auto width = static_cast<std::int64_t>(parents.size() / kept.size());
  if (width != beams) {
    move(kept, {capacity, 0, width, renamed(parents, kept)});
    return;
  }
  if (width > 1) rename(parents, kept);
  if (static_cast<double>(kept.size()) < spec::sparse * static_cast<double>(batch)) {
    move(kept, {capacity});
  } else if (!all) {
    slots = std::move(fewer);
    if (!positions.empty()) keep_positions(slots);
  }
}

/// Give each row the history of the row that it continues; their number is unchanged.
void InPlaceState::rename(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& kept) {
  const std::size_t filled = size(position[0]), rows = size(beams), room = size(capacity);
  histories_.resize(rows * filled);
  for (std::size_t i = 0; i < kept.size(); ++i) {
    const std::int32_t* const from = &parents[i * rows];
    std::int32_t* const own = &written_by[size(kept[i]) * rows * room];
    std::size_t first = 0;  // often the best rows continue themselves
    while (first < rows && size(from[first]) % rows == first) ++first;
    for (std::size_t k = first; k < rows; ++k) {
      std::copy_n(own + size(from[k]) % rows * room, filled, &histories_[k * filled]);
    }
    for (std::size_t k = first; k < rows; ++k) std::copy_n(&histories_[k * filled], filled, own + k * room);
  }
}

/// (B', K', T) the beam that wrote each position of parents[i], which row i continues.
std::vector<std::int32_t> InPlaceState::renamed(const std::vector<std::int32_t>& parents,
                                                const std::vector<std::int32_t>& kept) const {
  const std::size_t filled = size(position[0]), rows = size(beams), width = parents.size() / kept.size();
  std::vector<std::int32_t> found(parents.size() * filled);
  for (std::size_t i = 0; i < parents.size(); ++i) {
    const std::size_t row = size(kept[i / width]) * rows + size(parents[i]) % rows;
    std::copy_n(&written_by[row * size(capacity)], filled, found.data() + i * filled);
  }
  return found;
}

void InPlaceState::make_room() {
  const std::int64_t room = 2 * longest <= capacity ? capacity : 2 * capacity;
  move(slots, {room, position[0] - longest});
}

void InPlaceState::move(std::vector<std::int32_t> kept, const Move& to) {
  const Old old{std::move(past), std::move(written_by), size(batch), size(beams), size(capacity)};
  const bool same = !to.spare && all_in_order(kept, old.batch);
  batch = static_cast<std::int64_t>(kept.size()) + to.spare;
  beams = to.beams ? to.beams : beams;
  capacity = to.capacity;
  make_buffers();
  copy_caches(old, kept, to);
  if (!same) keep_sentences(kept, to);
  if (!positions.empty()) {
    std::vector<std::int32_t> moved(size(batch * beams), 0);
    for (std::size_t row = 0; row < kept.size() * size(beams); ++row) {
      moved[row] = positions[size(kept[row / size(beams)]) * old.beams];
    }
    positions = std::move(moved);
    longest = *std::max_element(positions.begin(), positions.end());
  }
  position[0] -= static_cast<std::int32_t>(to.first);
  slots.resize(kept.size());
}

/// Copy what the rows in slots `kept` have written from position `to.first` on.
void InPlaceState::copy_caches(const Old& old, const std::vector<std::int32_t>& kept, const Move& to) {
  const std::size_t first = size(to.first), filled = size(position[0]) - first, rows = size(beams);
  const std::size_t heads = size(model_.heads), width = size(model_.head_dim), room = size(capacity);
  for (std::size_t row = 0; row < kept.size() * rows; ++row) {
    const std::size_t sentence = size(kept[row / rows]) * old.beams;  // its first row
    const std::size_t same = sentence + row % rows;
    if (!to.beams) {
      std::copy_n(&old.written_by[same * old.capacity + first], filled, &written_by[row * room]);
    }
    if (model_.recurrent) {  // by the beam that wrote its last position; before the first all are zeros
      const std::size_t state = size(model_.d_model);
      const std::size_t last = !to.beams ? same : sentence + (filled ? size(to.histories[row * filled + filled - 1]) : 0);
      for (std::size_t i = 0; i < past.size(); ++i) {
        std::copy_n(old.past[i].data() + last * state, state, past[i].data() + row * state);
      }
      continue;
    }
    for (std::size_t i = 0; i < old.past.size(); ++i) {
      for (std::size_t head = 0; head < heads; ++head) {
        float* place = past[i].data() + (row * heads + head) * room * width;
        const auto from = [&](std::size_t writer, std::size_t at) {
          return old.past[i].data() + ((writer * heads + head) * old.capacity + at) * width;
        };
        if (!to.beams) {
          std::memcpy(place, from(same, first), filled * width * sizeof(float));
          continue;
        }
        for (std::size_t at = 0; at < filled; ++at) {
          const std::size_t writer = sentence + size(to.histories[row * filled + at]);
          std::memcpy(place + at * width, from(writer, at), width * sizeof(float));
        }
      }
    }
  }
}

void InPlaceState::keep_sentences(const std::vector<std::int32_t>& kept, const Move& to) {
  std::vector<std::int32_t> lengths;
  for (const std::int32_t slot : kept) lengths.push_back(src_lengths[size(slot)]);
  lengths.resize(kept.size() + size(to.spare), 1);
  src_lengths = std::move(lengths);
  cross = gathered(cross, kept, to.spare, to.src_len);
  if (!listed) return;
  const std::size_t width = listed->filled.size();
  std::vector<float> mask;
  for (const std::int32_t slot : kept) {
    const float* own = listed->mask.data() + size(slot) * width;
    mask.insert(mask.end(), own, own + width);
  }
  listed->mask = std::move(mask);
}

void InPlaceState::admit(const std::vector<std::int32_t>& lengths, const std::vector<Ort::Value>& own) {
  const std::size_t count = lengths.size();
  const std::int64_t src_len = std::max(src_len_of(own[0]), src_len_of(cross[0]));
  if (size(batch) - slots.size() < count || src_len > src_len_of(cross[0])) {
    move(slots, {capacity, 0, 0, {}, static_cast<std::int64_t>(count), src_len});
  }
  if (positions.empty()) {  // all are at the same position
    positions.assign(tokens.size(), 0);
    for (const std::int32_t slot : slots) {
      std::fill_n(&positions[size(slot * beams)], size(beams), position[0]);
    }
    bound = false;
  }
  std::vector<char> taken(size(batch), 0);
  for (const std::int32_t slot : slots) taken[size(slot)] = 1;
  for (std::size_t slot = 0, next = 0; next < count; ++slot) {
    if (taken[slot]) continue;
    fill(slot, own, next);
    src_lengths[slot] = lengths[next++];
    slots.push_back(static_cast<std::int32_t>(slot));
  }
}

/// Give a slot to a new sentence, entry `entry` of (B, H, S, D).
void InPlaceState::fill(std::size_t slot, const std::vector<Ort::Value>& own, std::size_t entry) {
  const std::size_t rows = size(beams), heads = size(model_.heads), width = size(model_.head_dim), room = size(capacity);
  for (Buffer& buffer : past) {  // masked, but read: another sentence may have left NaN there
    if (model_.recurrent) {
      std::fill_n(buffer.data() + slot * rows * size(model_.d_model), rows * size(model_.d_model), 0.0F);
      continue;
    }
    for (std::size_t block = slot * rows * heads; block < (slot + 1) * rows * heads; ++block) {
      std::fill_n(buffer.data() + block * room * width, size(position[0]) * width, 0.0F);
    }
  }
  for (std::size_t i = 0; i < cross.size(); ++i) {
    const std::size_t wide = size(src_len_of(cross[i])) * width, used = size(src_len_of(own[i])) * width;
    for (std::size_t head = 0; head < heads; ++head) {
      float* const to = cross[i].GetTensorMutableData<float>() + (slot * heads + head) * wide;
      std::copy_n(own[i].GetTensorData<float>() + (entry * heads + head) * used, used, to);
      std::fill(to + used, to + wide, 0.0F);
    }
  }
  for (std::size_t row = slot * rows; row < (slot + 1) * rows; ++row) {
    positions[row] = 0;
    std::fill_n(&written_by[row * room], room, static_cast<std::int32_t>(row % rows));
  }
}

/// Continue with slots `kept`; free slots have position 0.
void InPlaceState::keep_positions(const std::vector<std::int32_t>& kept) {
  std::vector<char> stays(size(batch), 0);
  for (const std::int32_t slot : kept) stays[size(slot)] = 1;
  for (std::size_t row = 0; row < positions.size(); ++row) {
    if (!stays[row / size(beams)]) positions[row] = 0;
  }
  longest = *std::max_element(positions.begin(), positions.end());
}

}  // namespace tformer
