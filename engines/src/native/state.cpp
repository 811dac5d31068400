#include "native/state.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "spec.hpp"

namespace tformer::native {

void grow(Sentence& sentence, std::size_t rows, std::size_t capacity, const CacheSizes& sizes, Memory& memory) {
  Block own = sizes.take(rows * sizes.whole(capacity), memory);
  std::vector<std::int32_t> written_by(rows * capacity);
  for (std::size_t row = 0; row < rows; ++row) {
    std::fill_n(&written_by[row * capacity], capacity, static_cast<std::int32_t>(row));
  }
  Block states = sizes.cell ? memory.take(rows * sizes.states()) : Block();
  if (sizes.cell && sentence.rows) {
    std::memcpy(states.data(), sentence.states.data(), std::min(rows, sentence.rows) * sizes.states() * sizeof(float));
  }
  const std::size_t heads = sizes.cell ? 0 : 2 * sizes.layers * sizes.heads, filled = sizes.bytes(sizes.head(sentence.position));
  for (std::size_t row = 0; row < sentence.rows; ++row) {
    std::copy_n(&sentence.written_by[row * sentence.capacity], sentence.position, &written_by[row * capacity]);
    const std::size_t from = row * sizes.whole(sentence.capacity), to = row * sizes.whole(capacity);
    for (std::size_t head = 0; filled && head < heads; ++head) {
      std::memcpy(sizes.at(own, to + head * sizes.head(capacity)),
                  sizes.at(sentence.own, from + head * sizes.head(sentence.capacity)), filled);
    }
  }
  sentence.own = std::move(own);
  sentence.states = std::move(states);
  sentence.written_by = std::move(written_by);
  sentence.rows = rows;
  sentence.capacity = capacity;
}

void NativeState::make_room(const CacheSizes& sizes, Memory& memory) {
  for (Sentence& each : sentences) {
    const std::size_t rows = std::max({each.rows, beams, each.rows ? 0 : most_beams});
    if (each.position < each.capacity && rows == each.rows) continue;
    const std::size_t room = each.position < each.capacity ? each.capacity : 2 * each.capacity;
    grow(each, rows, std::max(room, size(spec::first_capacity)), sizes, memory);
  }
}

void NativeState::reorder(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& kept,
                          const CacheSizes& sizes, Memory& memory) {
  const std::size_t width = parents.size() / kept.size();
  std::size_t longest = 0;
  for (const std::int32_t number : kept) {  // all memory first: a state that gets none stays as it was
    Sentence& each = sentences[size(number)];
    if (width > each.rows) grow(each, width, std::max(each.capacity, size(spec::first_capacity)), sizes, memory);
    longest = std::max(longest, each.position);
  }
  histories_.resize(width * longest);
  left_.clear();
  left_.reserve(kept.size());
  for (std::size_t i = 0; i < kept.size(); ++i) {
    Sentence& each = sentences[size(kept[i])];
    const std::int32_t* const from = &parents[i * width];
    const std::size_t filled = each.position, room = each.capacity;
    std::size_t first = 0;  // the best often stay where they are
    while (first < width && size(from[first]) % beams == first) ++first;
    each.moved |= first < width;
    for (std::size_t k = first; k < width; ++k) {
      std::copy_n(&each.written_by[size(from[k]) % beams * room], filled, histories_.data() + k * filled);
    }
    for (std::size_t k = first; k < width; ++k) {
      std::copy_n(histories_.data() + k * filled, filled, &each.written_by[k * room]);
    }
  }
  beams = width;
  bool same = kept.size() == sentences.size();
  for (std::size_t i = 0; same && i < kept.size(); ++i) same = size(kept[i]) == i;
  if (same) return;
  for (const std::int32_t number : kept) left_.push_back(std::move(sentences[size(number)]));
  std::swap(sentences, left_);
  left_.clear();
}

}  // namespace tformer::native
