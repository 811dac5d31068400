// What a decode carries: every sentence has memory and a position of its own. Nothing moves when rows are reordered.
#pragma once

#include <cstring>
#include <memory>
#include <vector>

#include "engine.hpp"
#include "kernels/kernels.hpp"
#include "native/listed.hpp"
#include "native/memory.hpp"

namespace tformer::native {

/// Sizes of the caches, in numbers, and how these lie in memory.
struct CacheSizes {
  std::size_t layers = 0, heads = 0, size = 0;  // of a head
  std::size_t padded = 0;                       // numbers that a head's row takes, a multiple of 16
  kernels::Numbers numbers = kernels::Numbers::fp32;  // or bf16
  std::size_t cell = 0;  // width of a recurrent cell's state; 0: layers have self-attention

  /// Of all positions of one head, and of keys and values of all layers and heads.
  std::size_t head(std::size_t positions) const { return positions * padded; }
  std::size_t whole(std::size_t positions) const { return cell ? 0 : 2 * layers * heads * head(positions); }
  /// Floats of a row's states: of each layer two, of which a step reads the one that the step before wrote.
  std::size_t states() const { return 2 * layers * cell; }
  /// Where a layer's state after so many steps begins.
  std::size_t state(std::size_t row, std::size_t layer, std::size_t steps) const {
    return row * states() + (2 * layer + steps % 2) * cell;
  }
  /// Of one head's keys or values of a source.
  std::size_t source_head(std::size_t length) const {
    return static_cast<std::size_t>(
        kernels::source_size(static_cast<std::int64_t>(length), static_cast<std::int64_t>(size)));
  }
  /// Where the heads of a layer's keys or values of a source begin.
  std::size_t source(std::size_t layer, bool values, std::size_t length) const {
    return (2 * layer + (values ? 1 : 0)) * heads * source_head(length);
  }
  /// Where the heads of a layer's keys or values begin, of `positions`.
  std::size_t place(std::size_t layer, bool values, std::size_t positions) const {
    return (2 * layer + (values ? 1 : 0)) * heads * head(positions);
  }

  /// Bytes of so many numbers.
  std::size_t bytes(std::size_t count) const {
    return count * (numbers == kernels::Numbers::bf16 ? sizeof(kernels::Bf16) : sizeof(float));
  }
  /// A block for so many.
  Block take(std::size_t count, Memory& memory) const { return memory.take(bytes(count) / sizeof(float)); }
  /// Where a number of a block lies.
  std::byte* at(const Block& block, std::size_t place) const {
    return reinterpret_cast<std::byte*>(block.data()) + bytes(place);
  }
  /// The number itself.
  float number(const Block& block, std::size_t place) const {
    if (numbers == kernels::Numbers::fp32) return block.data()[place];
    kernels::Bf16 found;
    std::memcpy(&found, at(block, place), sizeof found);
    return kernels::widened(found);
  }
  /// Distance between two blocks, in numbers.
  std::int64_t between(const Block& from, const Block& to) const {
    return (at(to, 0) - at(from, 0)) / static_cast<std::int64_t>(bytes(1));
  }
};

/// A source and the rows that continue it.
struct Sentence {
  std::int32_t length = 0;             // of its source
  std::size_t position = 0;            // of its next token
  std::size_t rows = 0, capacity = 0;  // that there is room for
  Block cross;                         // [layer][k, v][head], see `kernels::Source`
  Block own;                           // [row][layer][k, v][head][capacity][padded]
  Block states;                        // [row][layer][after even, after odd steps][cell]
  std::vector<std::int32_t> written_by;  // (rows, capacity): the row that wrote each earlier position, once any moved
  bool moved = false;                    // whether a row has continued another
  std::vector<std::int32_t> listed;      // places in `NativeState::listed` of the tokens that it may use, in order
};

struct NativeState final : State {
  std::vector<Sentence> sentences;  // in the order of the next step's rows
  std::size_t beams = 1;            // rows of each
  std::size_t src_width = 0;        // source tokens of the widest that was asked for
  std::size_t most_beams = 1;       // that will be asked for, as far as is known
  std::unique_ptr<ShortlistWeights> listed;   // the tokens of all sentences, where they may not use others

  std::size_t rows() const { return sentences.size() * beams; }
  /// See `Engine::reorder`.
  void reorder(const std::vector<std::int32_t>& parents, const std::vector<std::int32_t>& kept,
               const CacheSizes& sizes, Memory& memory);
  /// Room for every sentence's next position.
  void make_room(const CacheSizes& sizes, Memory& memory);

 private:
  std::vector<std::int32_t> histories_;  // of the rows of one sentence
  std::vector<Sentence> left_;
};

/// Room in a sentence for so many rows and positions; what its rows have written stays.
void grow(Sentence& sentence, std::size_t rows, std::size_t capacity, const CacheSizes& sizes, Memory& memory);

}  // namespace tformer::native
