#include "decode/rules.hpp"

#include <algorithm>
#include <cmath>

#include "errors.hpp"
#include "spec.hpp"

namespace tformer {
namespace {

std::vector<std::int32_t> ordered(std::vector<std::int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace

void best_of(const Ruled& row, std::size_t count, std::vector<Choice>& best) {
  best.clear();
  const auto add = [&](const Choice& choice) {
    if (best.size() == count) {
      if (!better(choice, best.front())) return;
      std::pop_heap(best.begin(), best.end(), better);
      best.pop_back();
    }
    best.push_back(choice);
    std::push_heap(best.begin(), best.end(), better);
  };
  float bar = forbidden;
  const auto scan = [&](std::size_t begin, std::size_t end) {
    for (std::size_t v = begin; v < end; ++v) {
      if (!(row.scores[v] > bar)) continue;
      add({static_cast<std::int32_t>(v), row.scores[v]});
      if (best.size() == count) bar = best.front().score;
    }
  };
  constexpr std::size_t block = 64;
  std::size_t begin = 0;
  for (; row.scores && begin + block <= row.count; begin += block) {
    // Compilers make this quick; most blocks have nothing that is better.
    unsigned above = 0;
    for (std::size_t v = begin; v < begin + block; ++v) above |= static_cast<unsigned>(row.scores[v] > bar);
    if (above) scan(begin, begin + block);
  }
  if (row.scores) scan(begin, row.count);
  for (std::size_t i = 0; row.few && i < row.count; ++i) {
    if ((*row.few)[i].score > forbidden) add((*row.few)[i]);
  }
  std::sort_heap(best.begin(), best.end(), better);
}

std::int64_t longest_output(const DecodeOptions& options, std::int64_t positions, std::size_t src_tokens) {
  const std::int64_t most = std::min(options.max_tokens, positions);
  if (!(options.max_ratio > 0)) return most;
  const double share = std::min(options.max_ratio * static_cast<double>(src_tokens), static_cast<double>(most));
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(share));
}

void check_forced(std::size_t forced, std::int64_t longest, const DecodeOptions& options, const std::string& where) {
  const bool ends = options.forced_end && !options.endless;
  if (static_cast<std::int64_t>(forced) + (ends ? 1 : 0) <= longest) return;
  const std::string also = ends ? spec::forced_end : "";
  throw Error(Status::limit, where + spec::too_many_forced(static_cast<std::int64_t>(forced), also, longest));
}

Rules::Rules(const DecodeOptions& options, std::vector<std::int32_t> end_ids, std::int64_t positions,
             const std::vector<std::int32_t>& src_lengths, const std::vector<std::vector<std::int32_t>>& prefixes,
             const Trie* allowed)
    : options_(options),
      end_ids_(ordered(std::move(end_ids))),
      allowed_(allowed) {
  std::vector<std::int32_t> banned = token_ids(options.suppress);
  for (const auto& words : options.bad_words) {
    if (words.size() == 1) banned.push_back(token_ids(words)[0]);
    else bad_.push_back(token_ids(words));
  }
  banned_ = ordered(std::move(banned));
  const auto whole = [](double x) { return static_cast<std::int64_t>(std::floor(x)); };
  const auto least = [](double a, std::int64_t b) { return std::min(a, static_cast<double>(b)); };
  for (std::size_t i = 0; i < src_lengths.size(); ++i) {
    const std::int64_t most = longest_output(options, positions, static_cast<std::size_t>(src_lengths[i]));
    std::int64_t fewest = whole(least(options.min_ratio * src_lengths[i], most));
    fewest = std::min(std::max(fewest, std::min(options.min_tokens, positions)), most);
    longest_.push_back(static_cast<std::size_t>(most));
    shortest_.push_back(static_cast<std::size_t>(fewest));
    prefixes_.push_back(token_ids(options.first_ids));
    if (!prefixes.empty()) prefixes_[i].insert(prefixes_[i].end(), prefixes[i].begin(), prefixes[i].end());
  }
  soonest_ = *std::min_element(longest_.begin(), longest_.end());
  const std::size_t fewest = *std::max_element(shortest_.begin(), shortest_.end());
  early_steps_ = fewest ? fewest - 1 : 0;
  forced_steps_ = 0;
  for (std::size_t i = 0; i < prefixes_.size(); ++i) {
    const std::vector<std::int32_t>& prefix = prefixes_[i];
    forced_steps_ = std::max(forced_steps_, prefix.size());
    if (std::any_of(prefix.begin(), prefix.end(), [this](std::int32_t token) { return is_end(token); })) {
      throw Error(Status::limit, spec::end_is_forced);
    }
    check_forced(prefix.size(), static_cast<std::int64_t>(longest_[i]), options);
  }
}

std::size_t Rules::longest() const { return *std::max_element(longest_.begin(), longest_.end()); }

bool Rules::is_end(std::int32_t token) const {
  return std::find(end_ids_.begin(), end_ids_.end(), token) != end_ids_.end();
}

bool Rules::needs_all(std::size_t step) const {
  const auto ngram = static_cast<std::size_t>(options_.no_repeat_ngram);
  const auto may_end = [step](const std::vector<std::int32_t>& words) { return words.size() <= step + 1; };
  return options_.repetition_penalty != 1 || (0 < ngram && ngram <= step + 1) || step < forced_steps_ ||
         std::any_of(bad_.begin(), bad_.end(), may_end) ||
         (options_.sampling && !options_.top_k) || (options_.forced_end && step + 1 >= soonest_) || allowed_;
}

std::size_t Rules::spare(std::size_t step) const {
  return banned_.size() + (step < early_steps_ ? end_ids_.size() : 0);
}

bool Rules::forbids(std::int32_t token, std::size_t sentence, std::size_t step) const {
  return (step + 1 < shortest_[sentence] && is_end(token)) ||
         (!banned_.empty() && std::binary_search(banned_.begin(), banned_.end(), token));
}

bool Rules::reads_outputs() const {
  return options_.repetition_penalty != 1 || options_.no_repeat_ngram || !bad_.empty() || allowed_;
}

Ruled Rules::apply(const float* log_probs, std::size_t vocab, const std::vector<std::int32_t>& output,
                   std::size_t sentence, std::size_t step) {
  const auto at = [](std::int32_t token) { return static_cast<std::size_t>(token); };
  few_.clear();
  if (options_.forced_end && !end_ids_.empty() && step + 1 == longest_[sentence]) {
    const Trie::Node* node = allowed_ ? allowed_->after(output, prefixes_[sentence].size()) : nullptr;
    if (!allowed_ || (node && node->ends)) {
      for (const std::int32_t end : end_ids_) few_.push_back({end, 0.0F});
    }
    return {nullptr, few_.size(), &few_};
  }
  if (is_forced(sentence, step)) {
    const std::int32_t token = prefixes_[sentence][step];
    const bool free = options_.first_adds_zero && step < options_.first_ids.size();
    few_.push_back({token, free ? 0.0F : log_probs[at(token)]});
    return {nullptr, 1, &few_};
  }
  const bool early = step + 1 < shortest_[sentence];
  const bool repeats = options_.repetition_penalty != 1 && step > 0;
  if (!repeats && banned_.empty() && !early && !options_.no_repeat_ngram && bad_.empty() && !allowed_) {
    return {log_probs, vocab, nullptr};
  }

  row_.assign(log_probs, log_probs + vocab);
  if (repeats) {
    const auto penalty = static_cast<float>(options_.repetition_penalty);
    for (const std::int32_t token : output) row_[at(token)] = log_probs[at(token)] * penalty;
  }
  for (const std::int32_t token : banned_) row_[at(token)] = forbidden;
  if (early) {
    for (const std::int32_t end : end_ids_) row_[at(end)] = forbidden;
  }
  if (options_.no_repeat_ngram) forbid_ngrams(output);
  forbid_bad_words(output);
  if (!allowed_) return {row_.data(), vocab, nullptr};

  if (const Trie::Node* node = allowed_->after(output, prefixes_[sentence].size())) {
    for (const auto& [token, next] : node->next) {
      // End tokens stand below where the output may end here.
      if (!node->ends || !is_end(token)) few_.push_back({token, row_[at(token)]});
    }
    if (node->ends) {
      for (const std::int32_t end : end_ids_) few_.push_back({end, row_[at(end)]});
      std::sort(few_.begin(), few_.end(), [](const Choice& a, const Choice& b) { return a.token < b.token; });
    }
  }
  return {nullptr, few_.size(), &few_};
}

void Rules::forbid_ngrams(const std::vector<std::int32_t>& output) {
  const auto size = static_cast<std::size_t>(options_.no_repeat_ngram);
  if (output.size() + 1 < size) return;
  const auto last = output.end() - static_cast<std::ptrdiff_t>(size - 1);
  for (auto gram = output.begin(); output.end() - gram >= static_cast<std::ptrdiff_t>(size); ++gram) {
    const auto next = gram + static_cast<std::ptrdiff_t>(size - 1);
    if (std::equal(gram, next, last)) row_[static_cast<std::size_t>(*next)] = forbidden;
  }
}

void Rules::forbid_bad_words(const std::vector<std::int32_t>& output) {
  for (const std::vector<std::int32_t>& words : bad_) {
    const auto before = static_cast<std::ptrdiff_t>(words.size() - 1);
    if (static_cast<std::ptrdiff_t>(output.size()) < before) continue;
    if (std::equal(words.begin(), words.end() - 1, output.end() - before)) {
      row_[static_cast<std::size_t>(words.back())] = forbidden;
    }
  }
}

std::vector<std::vector<std::int32_t>> Rules::named() const {
  std::vector<std::int32_t> common = end_ids_;
  if (allowed_) {
    const auto& tokens = allowed_->tokens();
    common.insert(common.end(), tokens.begin(), tokens.end());
  }
  std::vector<std::vector<std::int32_t>> found(prefixes_.size(), common);
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i].insert(found[i].end(), prefixes_[i].begin(), prefixes_[i].end());
  }
  return found;
}

}  // namespace tformer
