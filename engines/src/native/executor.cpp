#include "native/executor.hpp"

#include <algorithm>

#include "errors.hpp"
#include "native/encoder_run.hpp"
#include "native/step_run.hpp"
#include "spec.hpp"

namespace tformer::native {

CacheSizes sizes_of(const Model& model, const Recipe& recipe) {
  CacheSizes sizes;
  sizes.layers = static_cast<std::size_t>(model.decoder_layers);
  sizes.heads = static_cast<std::size_t>(model.heads);
  sizes.size = static_cast<std::size_t>(model.head_dim);
  sizes.padded = static_cast<std::size_t>(kernels::padded(model.head_dim));
  if (model.recurrent) sizes.cell = static_cast<std::size_t>(model.d_model);
  if (recipe.cache_precision == "bf16") sizes.numbers = kernels::Numbers::bf16;
  return sizes;
}

const kernels::Kernels& kernels_of(const Choice& choice) {
  if (choice.kernels.empty()) return kernels::best();
  if (const kernels::Kernels* found = kernels::named(choice.kernels)) return *found;
  throw Error(Status::usage, kernels::refusal(choice.kernels));
}

Executor::Executor(std::shared_ptr<const Program> program, const Model& model, const Recipe& recipe, const Choice& choice)
    : program_(std::move(program)), kernels_(kernels_of(choice)), sizes_(sizes_of(model, recipe)), pool_(choice.threads) {
  encoder_ = std::make_unique<EncoderRun>(program_->encoder(), kernels_, choice.threads);
  step_ = std::make_unique<StepRun>(program_->step(), kernels_, choice.threads);
}

Executor::~Executor() = default;

void Executor::encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& lengths,
                      std::vector<Sentence>& sentences) {
  const std::size_t before = sentences.size();
  try {
    for (const std::int32_t length : lengths) {
      Sentence added;
      added.length = length;
      added.cross = sizes_.take(sizes_.source(sizes_.layers, false, static_cast<std::size_t>(length)), *memory_);
      sentences.push_back(std::move(added));
    }
    const std::size_t width = src_ids.size() / lengths.size();
    encoder_->prepare(src_ids.data(), width, &sentences[before], lengths.size(), sizes_, *memory_);
    pool_.run(*encoder_);
  } catch (...) {  // those before go on
    sentences.resize(before);
    throw;
  }
}

std::vector<float> Executor::memory(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& lengths) {
  if (program_->memory().instructions.empty()) {
    throw Error(Status::limit, spec::no_memory_graph);
  }
  if (!alone_) alone_ = std::make_unique<EncoderRun>(program_->memory(), kernels_, pool_.threads());
  std::vector<Sentence> sentences(lengths.size());
  for (std::size_t i = 0; i < lengths.size(); ++i) sentences[i].length = lengths[i];
  const std::size_t width = src_ids.size() / lengths.size();
  alone_->prepare(src_ids.data(), width, sentences.data(), sentences.size(), sizes_, *memory_);
  pool_.run(*alone_);
  return alone_->outputs(width);
}

void Executor::step(const std::vector<std::int32_t>& tokens, NativeState& state, std::size_t best, Asked asked,
                    Scores& scores) {
  state.make_room(sizes_, *memory_);
  step_->prepare(tokens, state, best, asked, sizes_, *memory_, scores);
  pool_.run(*step_);
  for (Sentence& each : state.sentences) ++each.position;
}

std::vector<std::vector<float>> Executor::cross_keys_values(const NativeState& state) const {
  const std::size_t heads = sizes_.heads, size = sizes_.size, width = state.src_width, lanes = kernels::lanes;
  std::vector<std::vector<float>> found;
  for (std::size_t i = 0; i < 2 * sizes_.layers; ++i) {
    const bool values = i % 2 == 1;
    std::vector<float> all(state.sentences.size() * heads * width * size, 0.0F);
    float* to = all.data();
    for (const Sentence& each : state.sentences) {
      const auto length = static_cast<std::size_t>(each.length);
      for (std::size_t head = 0; head < heads; ++head, to += width * size) {
        const std::size_t first = sizes_.source(i / 2, values, length) + head * sizes_.source_head(length);
        for (std::size_t t = 0; t < length; ++t) {
          const auto beside = static_cast<std::size_t>(kernels::key_lanes(each.length, static_cast<std::int64_t>(t)));
          for (std::size_t d = 0; d < size; ++d) {
            const std::size_t at = values ? t * sizes_.padded + d : t / lanes * lanes * size + d * beside + t % lanes;
            to[t * size + d] = sizes_.number(each.cross, first + at);
          }
        }
      }
    }
    found.push_back(std::move(all));
  }
  return found;
}

}  // namespace tformer::native
