// Runs a whole search, and scores given outputs.
#include "decode/decode.hpp"

#include <algorithm>
#include <string>

#include "decode/running.hpp"
#include "errors.hpp"

namespace tformer {
namespace {

void check_targets(const Engine& engine, const std::vector<std::vector<std::int32_t>>& targets) {
  const std::int64_t limit = engine.limits().tgt_tokens;
  const std::int32_t vocab = engine.model().tgt_vocab;
  for (const auto& target : targets) {
    if (target.empty() || static_cast<std::int64_t>(target.size()) > limit) {
      throw Error(Status::limit, "a target of " + std::to_string(target.size()) + " tokens: must have 1 to " +
                                     std::to_string(limit) + ", the end token included");
    }
    if (std::any_of(target.begin(), target.end(), [=](std::int32_t id) { return id < 0 || id >= vocab; })) {
      throw Error(Status::limit, "a target has a token id outside the vocabulary of " + std::to_string(vocab));
    }
  }
}

}  // namespace

void stop_if(const std::atomic<bool>* cancel) {
  if (!cancel || !cancel->load(std::memory_order_relaxed)) return;
  throw Error(Status::cancelled, "the translation was cancelled");
}

std::vector<std::vector<Hypothesis>> decode(Engine& engine, const Batch& batch, const DecodeOptions& options,
                                            const Hooks& hooks) {
  const auto search = make_search(engine, batch, options, hooks);
  ContinuousBatch running(engine);
  stop_if(hooks.cancel);
  running.join({search.get()});
  while (!search->done()) {
    stop_if(hooks.cancel);
    running.step();
  }
  return search->results();
}

std::vector<std::vector<double>> score(Engine& engine, const Batch& batch,
                                       const std::vector<std::vector<std::int32_t>>& targets,
                                       const std::atomic<bool>* cancel) {
  check_targets(engine, targets);
  const auto vocab = static_cast<std::size_t>(engine.model().tgt_vocab);
  std::vector<std::vector<double>> found(targets.size());
  std::vector<std::int32_t> live, tokens(targets.size(), engine.model().start_id);
  std::size_t longest = 0;
  for (std::size_t i = 0; i < targets.size(); ++i) {
    live.push_back(static_cast<std::int32_t>(i));
    longest = std::max(longest, targets[i].size());
  }
  const auto state =
      engine.encode(batch.src_ids, batch.src_lengths, {1, static_cast<std::int64_t>(longest), targets});
  Scores scores;
  std::vector<std::int32_t> keep;
  for (std::size_t step = 0; step < longest; ++step) {
    stop_if(cancel);
    engine.step(tokens, *state, true, false, scores);
    require_numbers(scores, batch.numbers, live, nullptr, step);
    keep.clear();
    tokens.clear();
    for (std::size_t row = 0; row < live.size(); ++row) {
      const auto i = static_cast<std::size_t>(live[row]);
      const std::int32_t token = targets[i][step];
      found[i].push_back(scores.log_probs[row * vocab + static_cast<std::size_t>(token)]);
      if (targets[i].size() == step + 1) continue;
      live[keep.size()] = live[row];
      keep.push_back(static_cast<std::int32_t>(row));
      tokens.push_back(token);
    }
    if (!keep.empty() && keep.size() < live.size()) engine.reorder(*state, keep, keep);
    live.resize(keep.size());
  }
  return found;
}

}  // namespace tformer
