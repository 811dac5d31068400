#include "native/encoder_run.hpp"

#include <algorithm>

namespace tformer::native {

using kernels::padded;

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

std::vector<float> EncoderRun::outputs(std::size_t width) const {
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
      attention.to = target(it, row, first);
      kernels_.attend_shared(attention, {0, source.length, 0, 1}, own);
    }
  });
}

}  // namespace tformer::native
