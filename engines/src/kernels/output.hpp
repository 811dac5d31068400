// The output layer: logits block by block, keeping only maxima, sums and the best tokens.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/rows.hpp"

namespace tformer::kernels {
namespace {

constexpr std::int64_t rows_at_once = 32;  // whose logits of a block fit into a core's cache
constexpr std::int64_t logits_ld = block_outputs + lanes;  // rows a power of two apart would evict each other

/// Whether a token comes before another.
inline bool better(float score, std::int32_t id, float other, std::int32_t other_id) {
  return score > other || (score == other && id < other_id);
}

/// Insert a token into the best ones, if it is among them.
inline void insert(float score, std::int32_t id, float* scores, std::int32_t* ids, std::int64_t best) {
  std::int64_t i = best - 1;
  if (!better(score, id, scores[i], ids[i])) return;
  for (; i > 0 && better(score, id, scores[i - 1], ids[i - 1]); --i) {
    scores[i] = scores[i - 1];
    ids[i] = ids[i - 1];
  }
  scores[i] = score;
  ids[i] = id;
}

constexpr std::int32_t no_id = INT32_MAX;

template <class V>
void start_output(const Output& work, std::int64_t threads) {
  for (std::int64_t i = 0; i < threads * work.rows * work.best; ++i) {
    work.best_logits[i] = -INFINITY;
    work.best_ids[i] = no_id;
  }
}

/// Maximum, sum and best tokens of one row's logits of a block; -inf behind the last.
template <class V>
TFORMER_INLINE void survey(const Output& work, const float* logits, std::int64_t row, std::int64_t block,
                           std::int64_t thread) {
  typename V::F most[4], sum = V::set(0.0F);
  TFORMER_UNROLL for (int j = 0; j < 4; ++j) most[j] = V::load(logits + j * lanes);
  for (std::int64_t i = 4 * lanes; i < block_outputs; i += 4 * lanes) {
    TFORMER_UNROLL for (int j = 0; j < 4; ++j) most[j] = V::max(V::load(logits + i + j * lanes), most[j]);
  }
  const float largest = V::largest(V::max(V::max(most[0], most[1]), V::max(most[2], most[3])));
  for (std::int64_t i = 0; i < block_outputs; i += lanes) {
    sum = V::add(sum, exp_below<V>(V::sub(V::load(logits + i), V::set(largest))));
  }
  const std::int64_t at = row * blocks_of(work.matrix) + block, first = (thread * work.rows + row) * work.best;
  work.largest[at] = largest;
  work.sums[at] = V::sum(sum);
  float* scores = work.best_logits + first;
  std::int32_t* ids = work.best_ids + first;
  if (!work.best || !(largest >= scores[work.best - 1])) return;
  for (std::int64_t i = 0; i < block_outputs; i += lanes) {
    std::uint32_t found = V::at_least(V::load(logits + i), V::set(scores[work.best - 1]));
    for (; found; found &= found - 1) {
      const std::int64_t j = i + __builtin_ctz(found), id = block * block_outputs + j;
      if (id < work.matrix.outputs) insert(logits[j], static_cast<std::int32_t>(id), scores, ids, work.best);
    }
  }
}

template <class V, void (*multiply)(const Product&, const Piece&)>
void output(const Output& work, const OutputPiece& piece) {
  constexpr std::int64_t panels = block_outputs / lanes;
  alignas(64) float logits[rows_at_once * logits_ld];
  const std::int64_t outputs = work.matrix.outputs, end = piece.row + piece.rows;
  Product product;
  product.matrix = work.matrix;
  product.x = work.x;
  product.finish.to.ld = logits_ld;
  for (std::int64_t block = piece.block; block < piece.block + piece.blocks; ++block) {
    const std::int64_t width = least(block_outputs, outputs - block * block_outputs);
    for (std::int64_t row = piece.row; row < end; row += rows_at_once) {
      const std::int64_t rows = least(rows_at_once, end - row);
      // As if all were kept; by numbers, as no pointer may stand before its array.
      const auto before = static_cast<std::uintptr_t>(row * logits_ld + block * block_outputs) * sizeof(float);
      product.finish.to.floats = reinterpret_cast<float*>(reinterpret_cast<std::uintptr_t>(logits) - before);
      if (!work.given) multiply(product, {row, rows, block * panels, padded(width) / lanes});
      for (std::int64_t r = 0; r < rows; ++r) {
        float* own = logits + r * logits_ld;
        const float* const given = work.given ? work.given + (row + r) * work.given_ld + block * block_outputs : nullptr;
        if (given) std::memcpy(own, given, static_cast<std::size_t>(width) * sizeof(float));
        for (std::int64_t i = width; i < block_outputs; ++i) own[i] = -INFINITY;
        if (work.logits) {
          float* to = work.logits + (row + r) * work.logits_ld + block * block_outputs;
          over(width, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA { put<V>(to + i, V::load(own + i), n); });
        }
        survey<V>(work, own, row + r, block, piece.thread);
      }
    }
  }
}

/// log of the sum of exp(logit - largest) of all blocks.
template <class V>
TFORMER_INLINE float log_sum(const float* largest, const float* sums, std::int64_t blocks, float most) {
  typename V::F total = V::set(0.0F);
  over(blocks, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA {
    typename V::F weight = exp_below<V>(V::sub(get<V>(largest + i, n), V::set(most)));
    if (n < lanes) weight = V::first(weight, V::set(0.0F), n);
    total = V::fma(weight, get<V>(sums + i, n), total);
  });
  float found[lanes];
  V::store(found, log<V>(V::set(V::sum(total))));
  return found[0];
}

template <class V>
void finish_output(const Output& work, const Best& best) {
  const std::int64_t blocks = blocks_of(work.matrix), count = work.best;
  for (std::int64_t r = best.row; r < best.row + best.rows; ++r) {
    const float* largest = work.largest + r * blocks;
    float most = largest[0];
    for (std::int64_t i = 1; i < blocks; ++i) most = largest[i] > most ? largest[i] : most;
    const float sum = log_sum<V>(largest, work.sums + r * blocks, blocks, most);
    float* scores = work.best_logits + r * count;  // of the first thread, which gets those of the others
    std::int32_t* ids = work.best_ids + r * count;
    for (std::int64_t t = 1; t < best.threads; ++t) {
      const std::int64_t other = (t * work.rows + r) * count;
      for (std::int64_t i = 0; i < count; ++i) {
        insert(work.best_logits[other + i], work.best_ids[other + i], scores, ids, count);
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      best.ids[r * count + i] = ids[i] == no_id ? -1 : ids[i];
      best.scores[r * count + i] = (scores[i] - most) - sum;
    }
    if (!work.logits) continue;
    float* row = work.logits + r * work.logits_ld;
    over(work.matrix.outputs, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA {
      put<V>(row + i, V::sub(V::sub(get<V>(row + i, n), V::set(most)), V::set(sum)), n);
    });
  }
}

}  // namespace
}  // namespace tformer::kernels
