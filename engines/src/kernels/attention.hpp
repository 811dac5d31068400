// Attention over cached positions, and over keys and values that queries share. `E`: their element type, float or Bf16.
#pragma once

#include "kernels/rows.hpp"

namespace tformer::kernels {
namespace {

/// Replace scores (padded(length), -inf past the length) by exp(score - largest); returns 1 / their sum.
template <class V>
TFORMER_INLINE float soften(float* scores, std::int64_t length, typename V::F most) {
  const typename V::F largest = V::set(V::largest(most));
  typename V::F sum = V::set(0.0F);
  for (std::int64_t t = 0; t < length; t += lanes) {
    const typename V::F weight = exp_below<V>(V::sub(V::load(scores + t), largest));
    sum = V::add(sum, weight);
    V::store(scores + t, weight);
  }
  return 1.0F / V::sum(sum);
}

/// Load cached numbers, and prefetch those that are read next, `next` elements further; 0: there are none. One at a time,
/// between the arithmetic: for many at once the core waits.
template <class V, class E>
TFORMER_INLINE typename V::F load_and_fetch(const E* from, std::int64_t next) {
  if (next) V::prefetch_far(from + next);
  return V::load(from);
}

/// Weighted sums of values, `C` times 16 columns, in four chains; value(t) is the row of position t.
template <class V, int C, class Value>
TFORMER_INLINE void mix(const float* weights, std::int64_t length, float inverse, Value value, std::int64_t next, float* out) {
  typename V::F sums[4][C];
  TFORMER_UNROLL for (int i = 0; i < 4 * C; ++i) sums[i / C][i % C] = V::set(0.0F);
  const auto add = [&](std::int64_t t, int chain) TFORMER_LAMBDA {
    const typename V::F weight = V::set(weights[t]);
    const auto* row = value(t);
    TFORMER_UNROLL for (int c = 0; c < C; ++c) {
      sums[chain][c] = V::fma(weight, load_and_fetch<V>(row + c * lanes, next), sums[chain][c]);
    }
  };
  std::int64_t t = 0;
  for (; t + 4 <= length; t += 4) {
    add(t, 0);
    add(t + 1, 1);
    add(t + 2, 2);
    add(t + 3, 3);
  }
  if (t < length) add(t, 0);
  if (t + 1 < length) add(t + 1, 1);
  if (t + 2 < length) add(t + 2, 2);
  TFORMER_UNROLL for (int c = 0; c < C; ++c) {
    const typename V::F sum = V::add(V::add(sums[0][c], sums[2][c]), V::add(sums[1][c], sums[3][c]));
    V::store(out + c * lanes, V::mul(sum, V::set(inverse)));
  }
}

/// The same for all columns of a head.
template <class V, class Value>
TFORMER_INLINE void mix_head(const float* weights, std::int64_t length, float inverse, std::int64_t columns, Value value,
                             std::int64_t next, float* out) {
  std::int64_t c = 0;
  for (; c + V::columns <= columns; c += V::columns) {
    mix<V, V::columns>(weights, length, inverse, [&](std::int64_t t) TFORMER_LAMBDA { return value(t) + c * lanes; },
                       next, out + c * lanes);
  }
  for (; c < columns; ++c) {
    mix<V, 1>(weights, length, inverse, [&](std::int64_t t) TFORMER_LAMBDA { return value(t) + c * lanes; }, next,
              out + c * lanes);
  }
}

/// Copy one head's values, padded with zeros to a multiple of 16.
template <class V, class E>
TFORMER_INLINE void copy_head(const float* from, std::int64_t size, E* to) {
  over(size, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA { V::store(to + i, get<V>(from + i, n)); });
}

/// Store one head's result without its padding.
template <class V>
TFORMER_INLINE void write_head(const Writer<V>& write, const float* from, std::int64_t size, std::int64_t row,
                               std::int64_t head) {
  over(size, [&](std::int64_t i, std::int64_t n) TFORMER_LAMBDA { write(V::load(from + i), row, head * size + i, n); });
}

/// Scores of one head of a row over its cache. `C`: columns / 16 if constant, or 0.
template <class V, int C, class Key>
TFORMER_INLINE typename V::F score(const float* q, std::int64_t columns, std::int64_t length, float scale,
                                   const float* bias, Key key, std::int64_t next, float* scores) {
  const std::int64_t count = C ? C : columns;
  typename V::F kept[C ? C : 1], most = V::set(-INFINITY);
  TFORMER_UNROLL for (int c = 0; c < C; ++c) kept[c] = V::load(q + c * lanes);
  for (std::int64_t t = 0; t < length; t += lanes) {
    const std::int64_t n = least(lanes, length - t);
    typename V::F products[lanes];
    TFORMER_UNROLL for (int j = 0; j < lanes; ++j) {
      const auto* k = key(t + (j < n ? j : n - 1));  // past the length the last one again, which is dropped below
      typename V::F sum = V::mul(C ? kept[0] : V::load(q), load_and_fetch<V>(k, next));
      for (std::int64_t c = 1; c < count; ++c) {
        sum = V::fma(C ? kept[C ? c : 0] : V::load(q + c * lanes), load_and_fetch<V>(k + c * lanes, next), sum);
      }
      products[j] = sum;
    }
    const typename V::F added = bias ? V::load(bias + t) : V::set(0.0F);
    typename V::F found = V::fma(V::sums(products), V::set(scale), added);
    found = V::first(found, V::set(-INFINITY), n);
    most = V::max(found, most);
    V::store(scores + t, found);
  }
  return most;
}

/// The scores of one head, and where the row's new keys and values go first.
template <class V, class E>
TFORMER_INLINE typename V::F score_head(const SelfAttention& work, std::int64_t row, std::int64_t head,
                                        const std::int64_t* from, std::int64_t next, float* q, float* scores) {
  const std::int64_t size = work.size, columns = padded(size) / lanes, position = work.positions[row];
  const std::int64_t at = row * work.ld + head * size, length = position + 1;
  E* keys = static_cast<E*>(work.keys) + head * work.head_stride;
  E* values = static_cast<E*>(work.values) + head * work.head_stride;
  copy_head<V>(work.k + at, size, keys + from[position]);
  copy_head<V>(work.v + at, size, values + from[position]);
  copy_head<V>(work.q + at, size, q);
  const float* bias = work.bias ? work.bias + head * work.bias_stride - position : nullptr;
  const auto key = [&](std::int64_t t) TFORMER_LAMBDA { return keys + from[t]; };
  if (columns == 1) return score<V, 1>(q, columns, length, work.scale, bias, key, next, scores);
  if (columns == 2) return score<V, 2>(q, columns, length, work.scale, bias, key, next, scores);
  if (columns == 4) return score<V, 4>(q, columns, length, work.scale, bias, key, next, scores);
  return score<V, 0>(q, columns, length, work.scale, bias, key, next, scores);
}

template <class V, class E>
void attend_self_of(const SelfAttention& work, const Heads& piece, float* scratch) {
  constexpr std::int64_t together = 4;  // heads at a time, so that their chains of additions overlap
  const Writer<V> write(work.to);
  const std::int64_t size = work.size, room = padded(size), end = piece.head + piece.heads;
  const E* values = static_cast<const E*>(work.values);
  const auto next = [&](std::int64_t head) TFORMER_LAMBDA {  // where no next call is known, the next head
    return work.ahead || head + 1 == end ? work.ahead : work.head_stride;
  };
  for (std::int64_t r = piece.row; r < piece.row + piece.rows; ++r) {
    const std::int64_t position = work.positions[r], length = position + 1;
    float *q = scratch, *mixed = scratch + largest_head, *scores = mixed + largest_head;
    auto* from = reinterpret_cast<std::int64_t*>(scores + together * padded(length));  // where each position begins
    for (std::int64_t t = 0; t < length; ++t) {
      const bool other = work.written_by && t < position;
      from[t] = (other ? work.written_by[r * work.written_ld + t] : r) * work.slot_stride + t * room;
    }
    for (std::int64_t h = piece.head; h < end; h += together) {
      const std::int64_t count = least(together, end - h);
      typename V::F most[together];
      float inverse[together];
      for (std::int64_t i = 0; i < count; ++i) {
        most[i] = score_head<V, E>(work, r, h + i, from, next(h + i), q, scores + i * padded(length));
      }
      for (std::int64_t i = 0; i < count; ++i) inverse[i] = soften<V>(scores + i * padded(length), length, most[i]);
      for (std::int64_t i = 0; i < count; ++i) {
        const E* own = values + (h + i) * work.head_stride;
        const auto value = [&](std::int64_t t) TFORMER_LAMBDA { return own + from[t]; };
        mix_head<V>(scores + i * padded(length), length, inverse[i], room / lanes, value, next(h + i), mixed);
        write_head<V>(write, mixed, size, r, h + i);
      }
    }
  }
}

template <class V>
void attend_self(const SelfAttention& work, const Heads& piece, float* scratch) {
  if (work.cached == Numbers::bf16) return attend_self_of<V, Bf16>(work, piece, scratch);
  attend_self_of<V, float>(work, piece, scratch);
}

template <class V, class E>
void pack_source_of(const Source& work, std::int64_t head, std::int64_t heads) {
  const std::int64_t size = work.size, room = padded(size);
  for (std::int64_t h = head; h < head + heads; ++h) {
    E* keys = static_cast<E*>(work.keys) + h * work.head_stride;
    E* values = static_cast<E*>(work.values) + h * work.head_stride;
    for (std::int64_t t = 0; t < work.length; ++t) {
      copy_head<V>(work.v + t * work.v_ld + h * size, size, values + t * room);
    }
    for (std::int64_t t = 0; t < work.length; t += lanes) {
      const std::int64_t beside = key_lanes(work.length, t);
      over(size, [&](std::int64_t d, std::int64_t n) TFORMER_LAMBDA {
        typename V::F part[lanes];
        for (std::int64_t j = 0; j < lanes; ++j) {
          const bool real = t + j < work.length;
          part[j] = real ? get<V>(work.k + (t + j) * work.k_ld + h * size + d, n) : V::set(0.0F);
        }
        V::transpose(part);
        for (std::int64_t j = 0; j < n; ++j) put<V>(keys + t * size + (d + j) * beside, part[j], beside);
      });
    }
  }
}

template <class V>
void pack_source(const Source& work, std::int64_t head, std::int64_t heads) {
  if (work.cached == Numbers::bf16) return pack_source_of<V, Bf16>(work, head, heads);
  pack_source_of<V, float>(work, head, heads);
}

/// Scores of Q queries and B blocks of keys, in `chains` chains over the size of a head; `half`: one block of 8.
template <class V, int chains, int Q, int B, bool half = false, class E>
TFORMER_INLINE void score_shared(const float* const (&q)[Q], const E* keys, std::int64_t size, float scale,
                                 const float* const (&bias)[Q], float* const (&scores)[Q], std::int64_t t,
                                 std::int64_t length, std::int64_t next, typename V::F (&most)[Q]) {
  typename V::F sums[chains][Q][B];
  TFORMER_UNROLL for (int i = 0; i < chains * Q * B; ++i) sums[i / (Q * B)][i / B % Q][i % B] = V::set(0.0F);
  const E* block = keys + t * size;
  const auto add = [&](std::int64_t d, int chain) TFORMER_LAMBDA {
    typename V::F key[B];
    TFORMER_UNROLL for (int b = 0; b < B; ++b) {
      const E* from = block + (half ? d * lanes / 2 : (b * size + d) * lanes);
      if (next) V::prefetch_far(from + next);
      key[b] = half ? V::load_half(from) : V::load(from);
    }
    TFORMER_UNROLL for (int i = 0; i < Q; ++i) {
      const typename V::F x = V::set(q[i][d]);
      TFORMER_UNROLL for (int b = 0; b < B; ++b) sums[chain][i][b] = V::fma(x, key[b], sums[chain][i][b]);
    }
  };
  std::int64_t d = 0;
  for (; d + chains <= size; d += chains) {
    TFORMER_UNROLL for (int c = 0; c < chains; ++c) add(d + c, c);
  }
  TFORMER_UNROLL for (int c = 0; c < chains - 1; ++c) {
    if (d + c < size) add(d + c, c);
  }
  TFORMER_UNROLL for (int i = 0; i < Q; ++i) {
    TFORMER_UNROLL for (int b = 0; b < B; ++b) {
      typename V::F sum = sums[0][i][b];
      if constexpr (chains == 4) {
        sum = V::add(V::add(sum, sums[2][i][b]), V::add(sums[1][i][b], sums[3][i][b]));
      }
      const std::int64_t at = t + b * lanes;
      sum = V::fma(sum, V::set(scale), bias[i] ? V::load(bias[i] + at) : V::set(0.0F));
      if (at + lanes > length) sum = V::first(sum, V::set(-INFINITY), length - at);
      most[i] = V::max(sum, most[i]);
      V::store(scores[i] + at, sum);
    }
  }
}

/// Values of many queries, one chain each: Q queries times C columns of 16.
template <class V, int Q, int C, class E>
TFORMER_INLINE void mix_shared(float* const (&weights)[Q], const float (&inverse)[Q], const E* values,
                               std::int64_t room, std::int64_t length, std::int64_t next, float* const (&out)[Q]) {
  typename V::F sums[Q][C];
  TFORMER_UNROLL for (int i = 0; i < Q * C; ++i) sums[i / C][i % C] = V::set(0.0F);
  for (std::int64_t t = 0; t < length; ++t) {
    typename V::F row[C];
    TFORMER_UNROLL for (int c = 0; c < C; ++c) row[c] = load_and_fetch<V>(values + t * room + c * lanes, next);
    TFORMER_UNROLL for (int i = 0; i < Q; ++i) {
      const typename V::F weight = V::set(weights[i][t]);
      TFORMER_UNROLL for (int c = 0; c < C; ++c) sums[i][c] = V::fma(weight, row[c], sums[i][c]);
    }
  }
  TFORMER_UNROLL for (int i = 0; i < Q; ++i) {
    TFORMER_UNROLL for (int c = 0; c < C; ++c) V::store(out[i] + c * lanes, V::mul(sums[i][c], V::set(inverse[i])));
  }
}

/// Q queries of one head.
template <class V, class E, int chains, int Q, int B>
void attend_queries(const SharedAttention& work, const Writer<V>& write, std::int64_t row, std::int64_t head,
                    std::int64_t next, float* scratch) {
  const std::int64_t size = work.size, room = padded(size), length = work.length, end = padded(length);
  const bool half = key_lanes(length, length - 1) < lanes;
  const std::int64_t whole = half ? end - lanes : end;  // positions in blocks of 16
  const E* keys = static_cast<const E*>(work.keys) + head * work.head_stride;
  const E* values = static_cast<const E*>(work.values) + head * work.head_stride;
  const float *q[Q], *bias[Q];
  float *mixed[Q], *scores[Q], inverse[Q];
  typename V::F most[Q];
  TFORMER_UNROLL for (int i = 0; i < Q; ++i) {
    q[i] = work.q + (row + i) * work.ld + head * size;
    bias[i] = work.bias ? work.bias + head * work.bias_stride - (row + i) : nullptr;
    mixed[i] = scratch + i * largest_head;
    scores[i] = scratch + 4 * largest_head + i * end;
    most[i] = V::set(-INFINITY);
  }
  std::int64_t t = 0;
  for (; t + B * lanes <= whole; t += B * lanes) {
    score_shared<V, chains, Q, B>(q, keys, size, work.scale, bias, scores, t, length, next, most);
  }
  for (; t < whole; t += lanes) score_shared<V, chains, Q, 1>(q, keys, size, work.scale, bias, scores, t, length, next, most);
  if (half) score_shared<V, chains, Q, 1, true>(q, keys, size, work.scale, bias, scores, t, length, next, most);
  TFORMER_UNROLL for (int i = 0; i < Q; ++i) {
    inverse[i] = soften<V>(scores[i], length, most[i]);
    if (!work.weights) continue;
    float* weights = work.weights + ((row + i) * work.heads + head) * work.weights_ld;
    for (t = 0; t < end; t += lanes) V::store(weights + t, V::mul(V::load(scores[i] + t), V::set(inverse[i])));
  }
  if constexpr (chains == 4) {
    TFORMER_UNROLL for (int i = 0; i < Q; ++i) {
      const auto value = [&](std::int64_t at) TFORMER_LAMBDA { return values + at * room; };
      mix_head<V>(scores[i], length, inverse[i], room / lanes, value, next, mixed[i]);
    }
  } else {
    std::int64_t c = 0;
    float* out[Q];
    for (; c + V::columns * lanes <= room; c += V::columns * lanes) {
      TFORMER_UNROLL for (int i = 0; i < Q; ++i) out[i] = mixed[i] + c;
      mix_shared<V, Q, V::columns>(scores, inverse, values + c, room, length, next, out);
    }
    for (; c < room; c += lanes) {
      TFORMER_UNROLL for (int i = 0; i < Q; ++i) out[i] = mixed[i] + c;
      mix_shared<V, Q, 1>(scores, inverse, values + c, room, length, next, out);
    }
  }
  TFORMER_UNROLL for (int i = 0; i < Q; ++i) write_head<V>(write, mixed[i], size, row + i, head);
}

template <class V, class E>
void attend_shared_of(const SharedAttention& work, const Heads& piece, float* scratch) {
  const Writer<V> write(work.to);
  for (std::int64_t h = piece.head; h < piece.head + piece.heads; ++h) {
    std::int64_t r = piece.row;
    const std::int64_t end = piece.row + piece.rows;
    const auto queries = [&](auto chains, auto count, auto blocks) TFORMER_LAMBDA {
      constexpr int Q = decltype(count)::value;
      for (; r + Q <= end; r += Q) {
        const std::int64_t next = r == piece.row ? work.ahead : 0;  // the first queries fetch for all
        attend_queries<V, E, decltype(chains)::value, Q, decltype(blocks)::value>(work, write, r, h, next, scratch);
      }
    };
    if (work.chains == 1) {
      queries(Count<1>(), Count<V::queries>(), Count<V::key_blocks>());
      queries(Count<1>(), Count<1>(), Count<V::key_blocks>());
    } else {
      queries(Count<4>(), Count<V::few_queries>(), Count<V::few_blocks>());
      queries(Count<4>(), Count<1>(), Count<V::few_blocks>());
    }
  }
}

template <class V>
void attend_shared(const SharedAttention& work, const Heads& piece, float* scratch) {
  if (work.cached == Numbers::bf16) return attend_shared_of<V, Bf16>(work, piece, scratch);
  attend_shared_of<V, float>(work, piece, scratch);
}

}  // namespace
}  // namespace tformer::kernels
