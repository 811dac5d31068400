#include "native/step_run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tformer::native {

namespace {

using kernels::padded;

/// Nanoseconds to merge what threads and blocks found of a row.
constexpr double row_finished = 1000;
/// Rows from which on an output layer takes longer with each, roughly; fewer wait for its weights.
constexpr double rows_free = 8;

}  // namespace

StepRun::StepRun(const Code& code, const kernels::Kernels& kernels, int threads)
    : Run(code, kernels, threads), matrix_(code.instructions.back().matrix) {}

void StepRun::prepare(const std::vector<std::int32_t>& tokens, NativeState& state, std::size_t best, Asked asked,
                      const CacheSizes& sizes, Memory& memory, Scores& scores) {
  state_ = &state;
  scores_ = &scores;
  sizes_ = sizes;
  const std::size_t rows = state.rows(), beams = state.beams;
  ids_.assign(tokens.begin(), tokens.end());
  places_.resize(rows);
  positions_ = sources_ = 0;
  std::int64_t longest = 1;
  std::size_t most_listed = 0;
  for (std::size_t i = 0; i < state.sentences.size(); ++i) {
    const Sentence& each = state.sentences[i];
    std::fill_n(&places_[i * beams], beams, static_cast<std::int32_t>(each.position));
    positions_ += static_cast<std::int64_t>((each.position + 1) * beams);
    sources_ += static_cast<std::int64_t>(each.length) * static_cast<std::int64_t>(beams);
    longest = std::max({longest, static_cast<std::int64_t>(each.position) + 1, static_cast<std::int64_t>(each.length)});
    most_listed = std::max(most_listed, each.listed.size());
  }
  scores.best = static_cast<std::int64_t>(best);
  scores.ids.resize(rows * best);
  scores.scores.resize(rows * best);
  output_.matrix = matrix_;
  if (state.listed) output_.matrix.outputs = static_cast<std::int64_t>(most_listed);
  const auto vocab = size(matrix_.outputs), blocks = size(kernels::blocks_of(output_.matrix));
  const auto threads = static_cast<std::size_t>(threads_);
  scores.log_probs.resize(asked.all ? rows * vocab : 0);
  scores.attention.resize(asked.attention ? rows * state.src_width : 0);
  attention_ld_ = padded(static_cast<std::int64_t>(state.src_width));
  attention_weights_.resize(asked.attention ? rows * sizes.heads * size(attention_ld_) : 0);
  listed_.resize(state.listed ? rows * size(padded(state.listed->matrix.outputs)) : 0);
  own_.resize(state.listed ? rows * most_listed : 0);
  largest_.resize(rows * blocks);
  sums_.resize(rows * blocks);
  best_logits_.resize(threads * rows * best);
  best_ids_.resize(threads * rows * best);
  output_.best = scores.best;
  output_.rows = static_cast<std::int64_t>(rows);
  output_.logits = asked.all ? scores.log_probs.data() : nullptr;
  output_.logits_ld = static_cast<std::int64_t>(vocab);
  output_.largest = largest_.data();
  output_.sums = sums_.data();
  output_.best_logits = best_logits_.data();
  output_.best_ids = best_ids_.data();
  best_.threads = threads_;
  best_.ids = scores.ids.data();
  best_.scores = scores.scores.data();
  kernels_.start_output(output_, threads_);
  plan(static_cast<std::int64_t>(rows), longest, memory);
}

std::uint32_t StepRun::pieces_of(const Stage& stage) const {
  const Instruction& it = *stage.it;
  if (it.op == Op::output) {
    const auto sentences = static_cast<std::int64_t>(state_->sentences.size());
    if (stage.part == Stage::finish) return share(static_cast<double>(rows_) * row_finished, state_->listed ? sentences : rows_);
    const kernels::Matrix& matrix = state_->listed ? state_->listed->matrix : it.matrix;
    const double weights = static_cast<double>(matrix.outputs * matrix.inputs);
    const std::int64_t most = state_->listed ? kernels::panels_of(matrix) : kernels::blocks_of(matrix);
    return share(weights * std::max(1.0, static_cast<double>(rows_) / rows_free) / bytes_read, most);
  }
  if (it.op == Op::recur) return share(4 * static_cast<double>(rows_ * it.width) / floats_moved, rows_);
  const double read = static_cast<double>(it.op == Op::self ? positions_ : sources_);
  const auto width = static_cast<double>(it.heads * it.size);
  return share(2 * read * width / floats_moved, static_cast<std::int64_t>(state_->sentences.size()) * it.heads);
}

std::int64_t StepRun::scratch_floats(std::int64_t positions) const { return kernels::attention_scratch(positions); }

void StepRun::attend(const Stage& stage, std::uint32_t piece, int worker) {
  const Instruction& it = *stage.it;
  if (it.op == Op::recur) {
    const auto part = [&](std::uint32_t number) { return size(rows_ * number / stage.pieces); };
    return recur(it, part(piece), part(piece + 1));
  }
  const auto beams = static_cast<std::int64_t>(state_->beams), count = static_cast<std::int64_t>(state_->sentences.size());
  heads_of(stage, piece, count, [&](std::size_t number, std::int64_t head, std::int64_t heads) {
    const Sentence& sentence = state_->sentences[number];
    const std::size_t row = number * state_->beams;
    const kernels::Heads part = {0, beams, head, heads};
    if (it.op == Op::cross) {
      kernels::SharedAttention attention;
      attention.heads = it.heads;
      attention.size = it.size;
      attention.length = sentence.length;
      attention.scale = it.scale;
      attention.q = values_.floats(it.q, row);
      attention.ld = static_cast<std::int64_t>(values_.stride(it.q.value));
      attention.cached = sizes_.numbers;
      attention.keys = sizes_.at(sentence.cross, sizes_.source(size(it.layer), false, size(attention.length)));
      attention.values = sizes_.at(sentence.cross, sizes_.source(size(it.layer), true, size(attention.length)));
      attention.head_stride = kernels::source_size(attention.length, it.size);
      const Sentence* next = number + 1 < state_->sentences.size() ? &sentence + 1 : nullptr;
      if (next && padded(next->length) == padded(sentence.length)) {
        attention.ahead = sizes_.between(sentence.cross, next->cross);
      }
      if (!attention_weights_.empty() && size(it.layer) + 1 == sizes_.layers) {
        attention.weights = &attention_weights_[row * sizes_.heads * size(attention_ld_)];
        attention.weights_ld = attention_ld_;
      }
      attention.to = target(it, row);
      kernels_.attend_shared(attention, part, scratch(worker));
      return;
    }
    kernels::SelfAttention attention;
    attention.heads = it.heads;
    attention.size = it.size;
    attention.scale = it.scale;
    attention.q = values_.floats(it.q, row);
    attention.k = values_.floats(it.k, row);
    attention.v = values_.floats(it.v, row);
    attention.ld = static_cast<std::int64_t>(values_.stride(it.q.value));
    attention.cached = sizes_.numbers;
    attention.keys = sizes_.at(sentence.own, sizes_.place(size(it.layer), false, sentence.capacity));
    attention.values = sizes_.at(sentence.own, sizes_.place(size(it.layer), true, sentence.capacity));
    attention.slot_stride = static_cast<std::int64_t>(sizes_.whole(sentence.capacity));
    attention.head_stride = static_cast<std::int64_t>(sizes_.head(sentence.capacity));
    attention.positions = &places_[row];
    attention.written_by = sentence.moved ? sentence.written_by.data() : nullptr;
    attention.written_ld = static_cast<std::int64_t>(sentence.capacity);
    attention.bias = it.bias;
    attention.bias_stride = it.bias_stride;
    const Sentence* next = beams == 1 && number + 1 < state_->sentences.size() ? &sentence + 1 : nullptr;
    if (next && next->capacity == sentence.capacity) attention.ahead = sizes_.between(sentence.own, next->own);
    attention.to = target(it, row);
    kernels_.attend_self(attention, part, scratch(worker));
  });
}

/// Rows [row, last). A row reads the state of the row that wrote its last position.
void StepRun::recur(const Instruction& it, std::size_t row, std::size_t last) {
  const std::size_t beams = state_->beams, layer = size(it.layer);
  for (std::size_t r = row; r < last; ++r) {
    const Sentence& sentence = state_->sentences[r / beams];
    const std::size_t own = r % beams, position = sentence.position;
    kernels::Recurrence cell;
    cell.width = it.width;
    cell.x = values_.floats(it.x, r);
    cell.forget = values_.floats(it.y, r);
    cell.out = values_.floats(it.out, r);
    cell.state = sentence.states.data() + sizes_.state(own, layer, position + 1);
    if (position) {
      const std::size_t from = sentence.moved ? size(sentence.written_by[own * sentence.capacity + position - 1]) : own;
      cell.past = sentence.states.data() + sizes_.state(from, layer, position);
    }
    kernels_.recur(cell);
  }
}

void StepRun::output(const Stage& stage, std::uint32_t piece, int worker) {
  const auto part = [&](std::int64_t all, std::uint32_t number) { return all * number / stage.pieces; };
  if (stage.part == Stage::finish && !state_->listed) return finish(part(rows_, piece), part(rows_, piece + 1));
  if (stage.part == Stage::finish) {
    const auto sentences = static_cast<std::int64_t>(state_->sentences.size());
    for (std::int64_t i = part(sentences, piece); i < part(sentences, piece + 1); ++i) finish_listed(size(i));
    return;
  }
  if (state_->listed) {
    kernels::Product product;
    product.matrix = state_->listed->matrix;
    product.x = input(*stage.it);
    product.finish.to.floats = listed_.data();
    product.finish.to.ld = padded(product.matrix.outputs);
    const std::int64_t panels = kernels::panels_of(product.matrix), first = part(panels, piece);
    kernels_.product(product, {0, rows_, first, part(panels, piece + 1) - first});
    return;
  }
  kernels::Output work = output_;
  work.x = input(*stage.it);
  const std::int64_t blocks = kernels::blocks_of(work.matrix), first = blocks * piece / stage.pieces;
  kernels_.output(work, {0, rows_, first, blocks * (piece + 1) / stage.pieces - first, worker});
}

/// Rows [row, last).
void StepRun::finish(std::int64_t row, std::int64_t last) {
  kernels::Best best = best_;
  best.row = row;
  best.rows = last - row;
  kernels_.finish_output(output_, best);
  mean_attention(row, last);
}

/// The rows of one sentence, over its own list: sums do not depend on the lists of others.
void StepRun::finish_listed(std::size_t number) {
  const Sentence& sentence = state_->sentences[number];
  const std::size_t beams = state_->beams, row = number * beams, count = sentence.listed.size();
  const auto blocks = size(kernels::blocks_of(output_.matrix)), best = size(output_.best);
  const std::size_t ld = listed_.size() / state_->rows(), own_ld = own_.size() / state_->rows();
  kernels::Output work = output_;
  work.matrix.outputs = static_cast<std::int64_t>(count);
  work.rows = static_cast<std::int64_t>(beams);
  work.logits = &own_[row * own_ld];
  work.given = work.logits;
  work.logits_ld = work.given_ld = static_cast<std::int64_t>(own_ld);
  work.largest += row * blocks;
  work.sums += row * blocks;
  work.best_logits += row * best;
  work.best_ids += row * best;
  for (std::size_t r = 0; r < beams; ++r) {
    const float* const from = &listed_[(row + r) * ld];
    for (std::size_t i = 0; i < count; ++i) work.logits[r * own_ld + i] = from[sentence.listed[i]];
  }
  kernels_.start_output(work, 1);
  kernels_.output(work, {0, work.rows, 0, kernels::blocks_of(work.matrix), 0});
  std::int32_t* const ids = best_.ids + row * best;
  float* const scores = best_.scores + row * best;
  kernels_.finish_output(work, {0, work.rows, 1, ids, scores});
  const auto token = [&](std::size_t place) { return state_->listed->ids[size(sentence.listed[place])]; };
  for (std::size_t i = 0; i < beams * best; ++i) {
    if (ids[i] >= 0) ids[i] = token(size(ids[i]));
    else if (!std::isnan(scores[i])) ids[i] = 0;  // a list that is shorter than what is asked for; its score is -inf
  }
  if (output_.logits) {
    for (std::size_t r = 0; r < beams; ++r) {
      float* const all = output_.logits + (row + r) * size(output_.logits_ld);
      std::fill_n(all, output_.logits_ld, -std::numeric_limits<float>::infinity());
      for (std::size_t i = 0; i < count; ++i) all[token(i)] = work.logits[r * own_ld + i];
    }
  }
  mean_attention(static_cast<std::int64_t>(row), static_cast<std::int64_t>(row + beams));
}

/// Attention of rows [row, last): the mean over heads of the last layer's cross-attention, zeros behind a source.
void StepRun::mean_attention(std::int64_t row, std::int64_t last) {
  if (attention_weights_.empty()) return;
  const std::size_t heads = sizes_.heads, width = state_->src_width, ld = size(attention_ld_);
  for (std::size_t r = size(row); r < size(last); ++r) {
    const auto length = size(state_->sentences[r / state_->beams].length);
    float* const to = &scores_->attention[r * width];
    std::fill_n(to, width, 0.0F);
    for (std::size_t head = 0; head < heads; ++head) {
      const float* const from = &attention_weights_[(r * heads + head) * ld];
      for (std::size_t t = 0; t < length; ++t) to[t] += from[t];
    }
    for (std::size_t t = 0; t < length; ++t) to[t] /= static_cast<float>(heads);
  }
}

}  // namespace tformer::native
