// Searches that share an engine's steps, each at a token of its own: others join while some are on their way.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "decode/search.hpp"

namespace tformer {

/// Searches must outlive it, or be removed.
class ContinuousBatch {
 public:
  explicit ContinuousBatch(Engine& engine) : engine_(engine) {}

  /// Begin some searches with the next step. Throws Error, also where an engine's running states take no others; then
  /// those before go on without them.
  void join(const std::vector<Search*>& searches);
  /// The next token of every sentence. Throws Error; without `failed` none can go on then.
  void step();
  /// Leave out a search that is on its way.
  void remove(const Search* search);
  /// End all.
  void clear();
  /// Those that go on, in the order in which they joined.
  const std::vector<Search*>& searches() const { return searches_; }
  /// How many sentences go on.
  std::size_t sentences() const;

  /// Gets a search that cannot go on, while its exception is being handled; the others do.
  std::function<void(Search*)> failed;

 private:
  Engine& engine_;
  std::vector<Search*> searches_;
  std::unique_ptr<State> state_;
  std::size_t width_ = 1;  // rows of a sentence in the next step
  Scores scores_, own_;
  std::vector<std::int32_t> tokens_, parents_, kept_;  // of all sentences

  void step_alone(Search& search);
  void step_together();
  void take(Search& search, const Scores& scores, bool full);
};

}  // namespace tformer
