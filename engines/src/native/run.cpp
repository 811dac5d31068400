#include "native/run.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace tformer::native {
namespace {

using kernels::lanes;
using kernels::padded;

constexpr double worth = 4000;              // nanoseconds of work that are worth another piece
constexpr std::int64_t pieces_each = 4;     // pieces of a stage for each thread: whoever is late gets fewer
constexpr std::int64_t rows_together = 320;  // of a product, so that they stay in the nearest caches; a multiple of 32
/// What one thread does in a nanosecond, roughly: only how work is cut depends on it.
constexpr double floats_moved = 3, bytes_read = 12, integers_multiplied = 120, floats_multiplied = 20;

}  // namespace

Run::Run(const Code& code, const kernels::Kernels& kernels, int threads)
    : kernels_(kernels), threads_(threads), values_(code), scratch_(static_cast<std::size_t>(threads)) {
  for (const Instruction& each : code.instructions) {
    if (each.op == Op::give) continue;
    const bool product = each.op == Op::matmul || each.op == Op::output;
    if (product && each.matrix.numbers == kernels::Numbers::int4) stages_.push_back({&each, Stage::groups});
    stages_.push_back({&each, Stage::whole});
    if (each.op == Op::output) stages_.push_back({&each, Stage::finish});
  }
}

std::uint32_t Run::share(double nanoseconds, std::int64_t most) const {
  if (threads_ == 1) return 1;
  const auto wanted = static_cast<std::int64_t>(std::min(nanoseconds / worth, 1e6)) + 1;
  const std::int64_t found = std::max<std::int64_t>(1, std::min({wanted, most, threads_ * pieces_each}));
  return static_cast<std::uint32_t>(found > threads_ ? found - found % threads_ : found);  // as many for each thread
}

/// Nanoseconds that an instruction takes for all rows on one thread.
double Run::cost(const Instruction& it) const {
  const auto rows = static_cast<double>(rows_);
  if (!it.matrix.weights) return rows * static_cast<double>(it.width) / floats_moved;
  const double weights = static_cast<double>(it.matrix.outputs) * static_cast<double>(it.matrix.inputs);
  const bool floats = it.matrix.numbers == kernels::Numbers::fp32 || it.matrix.numbers == kernels::Numbers::bf16;
  const double bytes = weights * (floats ? 4 : 1);
  return std::max(bytes / bytes_read, weights * rows / (floats ? floats_multiplied : integers_multiplied));
}

void Run::plan(std::int64_t rows, std::int64_t positions, Memory& memory) {
  rows_ = rows;
  values_.resize(size(rows), memory);
  const std::int64_t floats = scratch_floats(positions);
  if (floats > scratch_size_) {
    scratch_size_ = 0;  // as in Values::resize
    const std::int64_t more = padded(floats * 5 / 4);
    for (Block& each : scratch_) {
      each = Block();
      each = memory.take(size(more));
    }
    scratch_size_ = more;
  }
  for (Stage& stage : stages_) {
    const Instruction& it = *stage.it;
    if (it.op == Op::matmul && stage.part == Stage::whole) {
      const std::int64_t blocks = (rows + rows_together - 1) / rows_together, panels = kernels::panels_of(it.matrix);
      const std::int64_t wanted = share(cost(it), panels * blocks);
      stage.columns = static_cast<std::uint32_t>(std::min(panels, (wanted + blocks - 1) / blocks));
      stage.pieces = stage.columns * static_cast<std::uint32_t>(blocks);
    } else if (it.op == Op::self || it.op == Op::cross || it.op == Op::keep || it.op == Op::output) {
      stage.pieces = pieces_of(stage);
    } else {
      stage.pieces = share(cost(it), rows);
    }
  }
  if (rows <= group_rows_) return;
  std::int64_t inputs = 0, groups = 0;
  for (const Stage& stage : stages_) {
    if (stage.part != Stage::groups) continue;
    const kernels::Matrix& matrix = stage.it->matrix;
    inputs = std::max(inputs, padded(matrix.inputs, matrix.group));
    groups = std::max(groups, padded(matrix.inputs, matrix.group) / matrix.group);
  }
  if (!inputs) return;
  const std::int64_t more = padded(rows, 32);
  group_integers_ = memory.take(size(more * inputs / 4));
  group_scales_ = memory.take(size(more * groups));
  group_sums_ = memory.take(size(more * groups));
  group_rows_ = more;
}

void Run::piece(std::size_t number, std::uint32_t piece, int worker) {
  const Stage& stage = stages_[number];
  const Instruction& it = *stage.it;
  const std::int64_t row = rows_ * piece / stage.pieces, rows = rows_ * (piece + 1) / stage.pieces - row;
  if (stage.part == Stage::groups) {
    kernels::Groups groups;
    groups.x = values_.floats(it.x);
    groups.ld = static_cast<std::int64_t>(values_.stride(it.x.value));
    groups.width = it.matrix.inputs;
    groups.group = it.matrix.group;
    groups.integers = reinterpret_cast<std::int8_t*>(group_integers_.data());
    groups.scales = group_scales_.data();
    groups.sums = reinterpret_cast<std::int32_t*>(group_sums_.data());
    kernels_.round_groups(groups, row, rows);
    return;
  }
  switch (it.op) {
    case Op::embed: return embed(it, row, rows);
    case Op::norm: return normalise(it, row, rows);
    case Op::matmul: return product(stage, piece);
    case Op::self:
    case Op::cross:
    case Op::keep: return attend(stage, piece, worker);
    case Op::output: return output(stage, piece, worker);
    case Op::give: return;
    case Op::round:
    case Op::activate:
    case Op::add:
    case Op::multiply: return elementwise(it, row, rows);
  }
}

kernels::Target Run::target(const Instruction& it) const {
  kernels::Target to;
  to.floats = values_.floats(it.out);
  to.ld = static_cast<std::int64_t>(values_.stride(it.out));
  to.bytes = values_.bytes(it.rounded);
  to.bytes_ld = static_cast<std::int64_t>(values_.stride(it.rounded));
  to.rounding = it.rounding;
  return to;
}

kernels::Input Run::input(const Instruction& it) const {
  kernels::Input x;
  x.ld = static_cast<std::int64_t>(values_.stride(it.x.value));
  if (it.matrix.numbers == kernels::Numbers::int8) {
    x.integers = values_.bytes(it.x.value);
    x.step = it.step;
    x.zero = it.zero;
  } else if (it.matrix.numbers == kernels::Numbers::int4) {
    x.integers = group_integers_.data();
    x.ld = padded(it.matrix.inputs, it.matrix.group);
    x.scales = group_scales_.data();
    x.sums = reinterpret_cast<const std::int32_t*>(group_sums_.data());
  } else {
    x.floats = values_.floats(it.x);
  }
  return x;
}

void Run::elementwise(const Instruction& it, std::int64_t row, std::int64_t rows) {
  kernels::Elementwise work;
  work.x = values_.floats(it.x);
  work.ld = static_cast<std::int64_t>(values_.stride(it.x.value));
  work.width = it.width;
  work.finish.activation = it.activation;
  const float* y = it.y ? values_.floats(it.y) : nullptr;
  const auto ld = static_cast<std::int64_t>(values_.stride(it.y.value));
  if (it.op == Op::multiply) {
    work.finish.gate = y;
    work.finish.gate_ld = ld;
  } else {
    work.finish.residual = y;
    work.finish.residual_ld = ld;
  }
  work.finish.to = target(it);
  kernels_.elementwise(work, row, rows);
}

void Run::normalise(const Instruction& it, std::int64_t row, std::int64_t rows) {
  kernels::Normed norm;
  norm.norm = it.norm;
  norm.eps = it.eps;
  norm.gain = it.gain;
  norm.bias = it.bias;
  norm.x = values_.floats(it.x);
  norm.ld = static_cast<std::int64_t>(values_.stride(it.x.value));
  norm.width = it.width;
  norm.to = target(it);
  kernels_.norm(norm, row, rows);
}

void Run::embed(const Instruction& it, std::int64_t row, std::int64_t rows) {
  kernels::Embedding embedding;
  embedding.ids = ids_.data();
  embedding.width = it.width;
  (it.scales ? static_cast<void>(embedding.integers = static_cast<const std::int8_t*>(it.table))
             : static_cast<void>(embedding.floats = static_cast<const float*>(it.table)));
  embedding.scales = it.scales;
  embedding.scale = it.factor;
  embedding.positions = it.positions;
  embedding.places = places_.data();
  embedding.out = values_.floats(it.out);
  embedding.ld = static_cast<std::int64_t>(values_.stride(it.out));
  kernels_.embed(embedding, row, rows);
}

void Run::product(const Stage& stage, std::uint32_t piece) {
  const Instruction& it = *stage.it;
  kernels::Product product;
  product.matrix = it.matrix;
  product.x = input(it);
  product.finish.activation = it.activation;
  if (it.gate) product.finish.gate = values_.floats(it.gate);
  product.finish.gate_ld = static_cast<std::int64_t>(values_.stride(it.gate.value));
  if (it.residual) product.finish.residual = values_.floats(it.residual);
  product.finish.residual_ld = static_cast<std::int64_t>(values_.stride(it.residual.value));
  product.finish.to = target(it);
  const std::int64_t block = piece / stage.columns, column = piece % stage.columns;
  const std::int64_t panels = kernels::panels_of(it.matrix), first = panels * column / stage.columns;
  kernels::Piece part;
  part.row = block * rows_together;
  part.rows = std::min(rows_together, rows_ - part.row);
  part.panel = first;
  part.panels = panels * (column + 1) / stage.columns - first;
  kernels_.product(product, part);
}

EncoderRun::EncoderRun(const Code& code, const kernels::Kernels& kernels, int threads)
    : Run(code, kernels, threads), last_(code.instructions.back()) {}

void EncoderRun::prepare(const std::int32_t* src_ids, std::size_t width, Sentence* added, std::size_t count,
                         const CacheSizes& sizes, Memory& memory) {
  sentences_ = added;
  count_ = count;
  sizes_ = sizes;
  longest_ = 0;
  ids_.clear();
  places_.clear();
  first_.clear();
  for (std::size_t i = 0; i < count; ++i) {
    first_.push_back(static_cast<std::int64_t>(ids_.size()));
    const std::int32_t* const own = src_ids + i * width;
    ids_.insert(ids_.end(), own, own + added[i].length);
    for (std::int32_t at = 0; at < added[i].length; ++at) places_.push_back(at);
    longest_ = std::max<std::int64_t>(longest_, added[i].length);
  }
  plan(static_cast<std::int64_t>(ids_.size()), longest_, memory);
}

std::vector<float> EncoderRun::given(std::size_t width) const {
  const View& view = last_.x;
  const auto columns = size(view.width);
  std::vector<float> found(count_ * width * columns, 0.0F);
  for (std::size_t i = 0; i < count_; ++i) {
    for (std::size_t t = 0; t < size(sentences_[i].length); ++t) {
      std::copy_n(values().floats(view, size(first_[i]) + t), columns, &found[(i * width + t) * columns]);
    }
  }
  return found;
}

std::uint32_t EncoderRun::pieces_of(const Stage& stage) const {
  const Instruction& it = *stage.it;
  const double sums = static_cast<double>(rows_) * static_cast<double>(it.heads * it.size);
  const double read = it.op == Op::self ? 2 * static_cast<double>(longest_) : 1;
  return share(sums * read / floats_moved, static_cast<std::int64_t>(count_) * it.heads);
}

std::int64_t EncoderRun::scratch_floats(std::int64_t positions) const {
  std::int64_t largest = 1;
  for (const Stage& stage : stages_) largest = std::max(largest, stage.it->size);
  return kernels::attention_scratch(positions) + 2 * kernels::source_size(positions, largest);
}

void EncoderRun::attend(const Stage& stage, std::uint32_t piece, int worker) {
  const Instruction& it = *stage.it;
  heads_of(stage, piece, static_cast<std::int64_t>(count_), [&](std::size_t number, std::int64_t head, std::int64_t heads) {
    const Sentence& sentence = sentences_[number];
    const auto row = size(first_[number]);
    kernels::Source source;
    source.size = it.size;
    source.length = sentence.length;
    source.k_ld = static_cast<std::int64_t>(values_.stride(it.k.value));
    source.v_ld = static_cast<std::int64_t>(values_.stride(it.v.value));
    source.head_stride = kernels::source_size(source.length, it.size);
    if (it.op == Op::keep) {
      source.heads = it.heads;
      source.k = values_.floats(it.k, row);
      source.v = values_.floats(it.v, row);
      source.cached = sizes_.numbers;
      source.keys = sizes_.at(sentence.cross, sizes_.source(size(it.layer), false, size(source.length)));
      source.values = sizes_.at(sentence.cross, sizes_.source(size(it.layer), true, size(source.length)));
      kernels_.pack_source(source, head, heads);
      return;
    }
    float* const own = scratch(worker);
    source.heads = 1;
    float* const keys = own + kernels::attention_scratch(longest_);
    source.keys = keys;
    source.values = keys + source.head_stride;
    for (; heads > 0; ++head, --heads) {
      const std::int64_t first = head * it.size;
      source.k = values_.floats(it.k, row) + first;
      source.v = values_.floats(it.v, row) + first;
      kernels_.pack_source(source, 0, 1);
      kernels::SharedAttention attention;
      attention.heads = 1;
      attention.size = it.size;
      attention.length = source.length;
      attention.scale = it.scale;
      attention.chains = 1;
      attention.q = values_.floats(it.q, row) + first;
      attention.ld = static_cast<std::int64_t>(values_.stride(it.q.value));
      attention.keys = source.keys;
      attention.values = source.values;
      attention.head_stride = source.head_stride;
      attention.bias = it.bias ? it.bias + head * it.bias_stride : nullptr;
      attention.bias_stride = it.bias_stride;
      attention.to = target(it);
      if (attention.to.floats) attention.to.floats += row * size(attention.to.ld) + size(first);
      if (attention.to.bytes) attention.to.bytes += row * size(attention.to.bytes_ld) + size(first);
      if (attention.to.rounding.shrink) attention.to.rounding.shrink += first;
      kernels_.attend_shared(attention, {0, source.length, 0, 1}, own);
    }
  });
}

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
  looks_ld_ = padded(static_cast<std::int64_t>(state.src_width));
  looks_.resize(asked.attention ? rows * sizes.heads * size(looks_ld_) : 0);
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
    if (stage.part == Stage::finish) return share(static_cast<double>(rows_) * 1000, state_->listed ? sentences : rows_);
    const kernels::Matrix& matrix = state_->listed ? state_->listed->matrix : it.matrix;
    const double weights = static_cast<double>(matrix.outputs * matrix.inputs);
    const std::int64_t most = state_->listed ? kernels::panels_of(matrix) : kernels::blocks_of(matrix);
    return share(weights * std::max(1.0, static_cast<double>(rows_) / 8) / bytes_read, most);
  }
  const double read = static_cast<double>(it.op == Op::self ? positions_ : sources_);
  const auto width = static_cast<double>(it.heads * it.size);
  return share(2 * read * width / floats_moved, static_cast<std::int64_t>(state_->sentences.size()) * it.heads);
}

std::int64_t StepRun::scratch_floats(std::int64_t positions) const { return kernels::attention_scratch(positions); }

void StepRun::attend(const Stage& stage, std::uint32_t piece, int worker) {
  const Instruction& it = *stage.it;
  const auto beams = static_cast<std::int64_t>(state_->beams), count = static_cast<std::int64_t>(state_->sentences.size());
  heads_of(stage, piece, count, [&](std::size_t number, std::int64_t head, std::int64_t heads) {
    const Sentence& sentence = state_->sentences[number];
    const std::size_t row = number * state_->beams;
    kernels::Target to = target(it);
    if (to.floats) to.floats += row * size(to.ld);
    if (to.bytes) to.bytes += row * size(to.bytes_ld);
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
      if (!looks_.empty() && size(it.layer) + 1 == sizes_.layers) {
        attention.weights = &looks_[row * sizes_.heads * size(looks_ld_)];
        attention.weights_ld = looks_ld_;
      }
      attention.to = to;
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
    attention.place_stride = static_cast<std::int64_t>(sizes_.whole(sentence.capacity));
    attention.head_stride = static_cast<std::int64_t>(sizes_.head(sentence.capacity));
    attention.positions = &places_[row];
    attention.written_by = sentence.moved ? sentence.written_by.data() : nullptr;
    attention.written_ld = static_cast<std::int64_t>(sentence.capacity);
    attention.bias = it.bias;
    attention.bias_stride = it.bias_stride;
    const Sentence* next = beams == 1 && number + 1 < state_->sentences.size() ? &sentence + 1 : nullptr;
    if (next && next->capacity == sentence.capacity) attention.ahead = sizes_.between(sentence.own, next->own);
    attention.to = to;
    kernels_.attend_self(attention, part, scratch(worker));
  });
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
  look(row, last);
}

/// The rows of one sentence, over what it may use: sums depend on no other sentence's list.
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
  look(static_cast<std::int64_t>(row), static_cast<std::int64_t>(row + beams));
}

/// Means over heads of what the last layer's cross-attention gave, of rows [row, last); zeros behind a source.
void StepRun::look(std::int64_t row, std::int64_t last) {
  if (looks_.empty()) return;
  const std::size_t heads = sizes_.heads, width = state_->src_width, ld = size(looks_ld_);
  for (std::size_t r = size(row); r < size(last); ++r) {
    const auto length = size(state_->sentences[r / state_->beams].length);
    float* const to = &scores_->attention[r * width];
    std::fill_n(to, width, 0.0F);
    for (std::size_t head = 0; head < heads; ++head) {
      const float* const from = &looks_[(r * heads + head) * ld];
      for (std::size_t t = 0; t < length; ++t) to[t] += from[t];
    }
    for (std::size_t t = 0; t < length; ++t) to[t] /= static_cast<float>(heads);
  }
}

}  // namespace tformer::native
