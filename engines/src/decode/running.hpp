// Several searches over one engine's steps, each at its own position; searches may join at any step.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "decode/search.hpp"

namespace tformer {

/// Searches must outlive it, or be removed. An error of the engine ends all of them; others may join after that.
class ContinuousBatch {
 public:
  explicit ContinuousBatch(Engine& engine) : engine_(engine) {}

  /// Add searches from the next step on. Throws Error, also where the engine's state cannot take more; the running ones
  /// then continue without them, unless the state is lost.
  void join(const std::vector<Search*>& searches);
  /// Run one step for every sentence. Throws Error.
  void step();
  /// Remove a running search. Throws Error.
  void remove(const Search* search);
  /// Remove all.
  void clear();
  /// Running searches, in the order in which they joined.
  const std::vector<Search*>& searches() const { return searches_; }
  /// Sentences that are running.
  std::size_t sentences() const;

  /// Called with a search that failed, while its exception is being handled. Without it, an exception of one ends all.
  std::function<void(Search*)> failed;

 private:
  Engine& engine_;
  std::vector<Search*> searches_;
  std::unique_ptr<State> state_;
  std::size_t width_ = 1;  // rows of a sentence in the next step
  Scores scores_, own_;
  std::vector<std::int32_t> tokens_, parents_, kept_;  // of all sentences

  template <typename Work>
  void run(const Work& work);
  void fail();
  void take_out(std::vector<Search*>::const_iterator leaving);
  void step_alone(Search& search);
  void step_together();
  void take(Search& search, const Scores& scores, bool full);
};

}  // namespace tformer
