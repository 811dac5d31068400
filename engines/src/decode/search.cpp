#include "decode/search.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "errors.hpp"
#include "spec.hpp"

namespace tformer {
namespace {

constexpr double nothing = -std::numeric_limits<double>::infinity();

}  // namespace

Search::Search(const Engine& engine, const Batch& batch, const DecodeOptions& options, const Hooks& hooks)
    : options_(options),
      hooks_(hooks),
      engine_(engine),
      batch_(batch),
      rules_(options, options.ends(engine.model().eos_id), engine.limits().tgt_tokens, batch.src_lengths,
             batch.prefixes, hooks.allowed),
      vocab_(static_cast<std::size_t>(engine.model().tgt_vocab)),
      values_(batch.src_lengths.size(), 0.0),
      scores_(values_),
      live_(values_.size(), 1),
      tokens_(values_.size(), engine.model().start_id) {
  for (std::size_t b = 0; b < batch.src_lengths.size(); ++b) sentences_.push_back(static_cast<std::int32_t>(b));
}

Outlook Search::outlook() const {
  const std::vector<std::int32_t> ends = options_.ends(engine_.model().eos_id);
  return {options_.rows(), static_cast<std::int64_t>(rules_.longest()), rules_.named(), ends.empty() ? -1 : ends.front(),
          options_.sampling};
}

bool Search::needs_all(const State& state) const {
  const auto ends = static_cast<std::int64_t>(rules_.end_count());
  // Behind the last one that may be drawn, one more, as in Python, where a draw's margin is measured to it.
  std::int64_t wanted = options_.sampling ? options_.top_k + 1 : options_.greedy() ? 1 : options_.beams + ends;
  wanted += static_cast<std::int64_t>(rules_.spare(step()));
  wanted = std::min(wanted, static_cast<std::int64_t>(vocab_));
  return rules_.needs_all(step()) || wanted > engine_.best(static_cast<std::int64_t>(width_), state);
}

void Search::take(const Scores& scores, bool full) {
  if (hooks_.strict) require_numbers(scores, batch_.numbers, sentences_, &live_, step());
  if (options_.attention()) history_.look(scores.attention, count() * width_);
  kept_.clear();
  begins_.clear();
  rows_.clear();
  candidates_.clear();
  advance(scores, full);
  keep();
  if (hooks_.on_step) hooks_.on_step(candidates_);
}

Ruled Search::ruled(const Scores& scores, std::size_t b, std::size_t row) {
  const std::size_t place = b * width_ + row;
  if (rules_.reads_outputs()) history_.written(place, written_);
  return rules_.apply(scores.log_probs.data() + place * vocab_, vocab_, written_, sentence(b), step());
}

std::int32_t Search::checked(std::int32_t token) const {
  if (token < 0 || static_cast<std::size_t>(token) >= vocab_) {
    throw Error(Status::engine, "the engine gave a token outside the vocabulary of " + std::to_string(vocab_) +
                                    ": export the bundle again");
  }
  return token;
}

void Search::go_on(std::size_t b) {
  kept_.push_back(static_cast<std::int32_t>(b));
  begins_.push_back(rows_.size());
  rows_.insert(rows_.end(), next_.begin(), next_.end());
}

void Search::keep() {
  const std::size_t before = count(), old_width = width_;
  begins_.push_back(rows_.size());
  width_ = 1;
  for (std::size_t i = 0; i < kept_.size(); ++i) width_ = std::max(width_, begins_[i + 1] - begins_[i]);
  rows_moved_ = kept_.size() < before || width_ != old_width;
  const std::size_t size = kept_.size() * width_;
  // A padding row beside sentences with more rows is fed some token.
  values_.assign(size, nothing);
  scores_.assign(size, nothing);
  samples_.assign(size, -1);
  live_.assign(size, 0);
  tokens_.assign(size, engine_.model().pad_id);
  parents_.resize(size);
  for (std::size_t i = 0; i < kept_.size(); ++i) {
    const auto old = static_cast<std::size_t>(kept_[i]);
    sentences_[i] = sentences_[old];
    const Row* rows = rows_.data() + begins_[i];
    for (std::size_t k = 0; k < width_; ++k) {
      const std::size_t place = i * width_ + k;
      const bool is_live = k < begins_[i + 1] - begins_[i];
      const Row& row = rows[is_live ? k : 0];
      parents_[place] = static_cast<std::int32_t>(old * old_width) + row.parent;
      rows_moved_ |= static_cast<std::size_t>(row.parent) != k;
      if (!is_live) continue;
      values_[place] = row.value;
      scores_[place] = row.score;
      samples_[place] = row.sample;
      live_[place] = 1;
      tokens_[place] = row.token;
    }
  }
  sentences_.resize(kept_.size());
  history_.add(parents_, tokens_);
}

void Search::stop() {
  sentences_.clear();
  kept_.clear();
  parents_.clear();
  tokens_.clear();
  width_ = 1;
  rows_moved_ = true;
}

Hypothesis Search::output(std::size_t b, const Candidate& last) const {
  Hypothesis output;
  output.score = last.score;
  output.value = last.value;
  history_.written(b * width_ + static_cast<std::size_t>(last.row), output.ids);
  output.finished = rules_.is_end(last.token);
  if (output.finished) output.end_id = last.token;
  else output.ids.push_back(last.token);
  describe(output, b, static_cast<std::size_t>(last.row));
  return output;
}

Hypothesis Search::stuck(std::size_t b, std::size_t row) const {
  const std::size_t place = b * width_ + row;
  Hypothesis output;
  output.score = scores_[place];
  output.value = values_[place];
  history_.written(place, output.ids);
  describe(output, b, row);
  return output;
}

void Search::describe(Hypothesis& output, std::size_t b, std::size_t row) const {
  const std::size_t length = output.ids.size() + (output.finished ? 1 : 0);
  if (!options_.sampling) output.value /= length_norm(std::max<std::size_t>(1, length), options_);
  if (!options_.attention()) return;
  const auto width = static_cast<std::size_t>(batch_.src_lengths[sentence(b)]);
  std::vector<const float*> looks = history_.looks(b * width_ + row);
  looks.resize(length);
  if (options_.coverage_penalty > 0 && !options_.sampling) {
    double logs = 0;
    for (std::size_t s = 0; s < width; ++s) {
      double covered = 0;
      for (const float* look : looks) covered += static_cast<double>(look[s]);
      logs += std::log(std::min(std::max(covered, 1e-10), 1.0));
    }
    output.value += options_.coverage_penalty * logs;
  }
  if (!options_.align) return;
  for (std::size_t i = 0; i < output.ids.size(); ++i) {
    output.alignment.push_back(static_cast<std::int32_t>(std::max_element(looks[i], looks[i] + width) - looks[i]));
  }
}

std::unique_ptr<Search> make_search(const Engine& engine, const Batch& batch, const DecodeOptions& options,
                                    const Hooks& hooks) {
  const std::int32_t vocab = engine.model().tgt_vocab;
  check_options(engine, options);
  for (const auto& prefix : batch.prefixes) check_tokens(prefix, vocab);
  if (hooks.allowed) check_tokens(hooks.allowed->tokens(), vocab);
  return options.sampling ? make_sampling(engine, batch, options, hooks) : make_beam(engine, batch, options, hooks);
}

void check_options(const Engine& engine, const DecodeOptions& options) {
  const std::int32_t vocab = engine.model().tgt_vocab;
  check_tokens(options.suppress, vocab);
  for (const auto& words : options.bad_words) check_tokens(words, vocab);
  check_tokens(options.end_ids, vocab);
  check_tokens(options.first_ids, vocab);
  const std::vector<std::int32_t> first = token_ids(options.first_ids), ends = options.ends(engine.model().eos_id);
  if (std::find_first_of(first.begin(), first.end(), ends.begin(), ends.end()) != first.end()) {
    throw Error(Status::limit, spec::end_is_forced);
  }
  if (options.rows() > engine.limits().beams) {
    const Limits& limits = engine.limits();
    throw Error(Status::limit, spec::too_many_rows(options.rows(), options.sampling ? "samples" : "beams", limits.beams,
                                                   limits.or_else(spec::more_rows)));
  }
  if (options.attention() && !engine.attention()) throw Error(Status::limit, spec::no_attention);
}

double length_norm(std::size_t length, const DecodeOptions& options) {
  const auto n = static_cast<double>(length);
  return std::pow(options.length_norm == "power" ? n : (5 + n) / 6, options.length_penalty);
}

void require_numbers(const Scores& scores, const std::vector<std::int64_t>& numbers,
                     const std::vector<std::int32_t>& sentences, const std::vector<char>* live, std::size_t step) {
  const auto best = static_cast<std::size_t>(scores.best);
  const std::size_t rows = scores.scores.size() / best, width = rows / sentences.size();
  for (std::size_t row = 0; row < rows; ++row) {
    if (scores.scores[row * best] > spec::least || (live && !(*live)[row])) continue;
    const auto sentence = static_cast<std::size_t>(sentences[row / width]);
    const std::int64_t request = numbers.empty() ? static_cast<std::int64_t>(sentence) : numbers[sentence];
    throw NotNumbers(spec::not_finite(static_cast<std::int64_t>(step) + 1), static_cast<std::uint64_t>(request));
  }
}

}  // namespace tformer
