#include "limits.hpp"

#include <algorithm>

#include "engine.hpp"
#include "errors.hpp"
#include "spec.hpp"

namespace tformer {
namespace {

[[noreturn]] void refuse(const std::string& message) { throw Error(Status::limit, message); }

}  // namespace

std::string Profile::shown() const {
  return std::to_string(batch) + "x" + std::to_string(beams) + "x" + std::to_string(src_len) + "x" +
         std::to_string(capacity);
}

bool Profile::holds(const Profile& wanted) const {
  return batch >= wanted.batch && beams >= wanted.beams && src_len >= wanted.src_len && capacity >= wanted.capacity;
}

std::size_t Limits::sentences(std::int64_t rows, std::size_t src, std::int64_t tgt) const {
  if (profiles.empty()) return static_cast<std::size_t>(batch);
  std::int64_t most = 1;
  for (const Profile& each : profiles) {
    if (each.holds({1, rows, static_cast<std::int64_t>(src), tgt})) most = std::max(most, each.batch);
  }
  return static_cast<std::size_t>(most);
}

void Limits::check_asked(std::int64_t max_tokens, std::int64_t wanted_beams) const {
  const auto check = [this](const char* name, std::int64_t wanted, std::int64_t most) {
    if (!profiles.empty() && wanted > most) refuse(spec::beyond_plans(name, wanted, most, hint));
  };
  check("max_tokens", max_tokens, tgt_tokens);
  check("beams", wanted_beams, beams);
}

void check_request(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                   const ModelInfo& model, const Limits& limits) {
  const auto batch = static_cast<std::int64_t>(src_lengths.size());
  const std::int64_t width = batch ? static_cast<std::int64_t>(src_ids.size()) / batch : 0;
  if (batch > limits.batch) refuse(spec::too_many_sentences(batch, limits.batch));
  if (width > limits.src_tokens) {
    refuse(spec::source_too_long(width, limits.src_tokens, limits.or_else(spec::longer_sources)));
  }
  const auto [least, most] = std::minmax_element(src_lengths.begin(), src_lengths.end());
  if (src_ids.empty() || *least < 1 || *most > width) refuse(spec::wrong_lengths(width));
  const auto [low, high] = std::minmax_element(src_ids.begin(), src_ids.end());
  if (*low < 0 || *high >= model.src_vocab) refuse(spec::source_id(*low < 0 ? *low : *high, model.src_vocab));
}

void check_step(std::int64_t beams, std::int64_t position, const Limits& limits) {
  if (beams > limits.beams) {
    refuse(spec::too_many_beams(beams, limits.beams, limits.or_else(spec::larger_beams)));
  }
  if (position >= limits.tgt_tokens) refuse(spec::too_many_steps(position + 1, limits.tgt_tokens));
}

void check_token(std::int64_t token, std::int32_t tgt_vocab) {
  if (token < 0 || token >= tgt_vocab) refuse(spec::target_id(token, tgt_vocab));
}

}  // namespace tformer
