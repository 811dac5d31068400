// Engines of one model for a Python process: each is lent to one state, or to one search, at a time.
#pragma once

#include <chrono>
#include <memory>
#include <mutex>
#include <vector>

#include "backend.hpp"
#include "engine.hpp"

namespace tformer::python {

/// Engines that nobody uses wait for the next state: each has threads and memory of its own.
class Engines : public std::enable_shared_from_this<Engines> {
 public:
  explicit Engines(std::shared_ptr<const Backend> backend) : backend_(std::move(backend)) {}

  const Backend& backend() const { return *backend_; }

  /// An engine for one thread; it comes back when its last owner is gone. Throws Error.
  std::shared_ptr<Engine> lend() {
    std::unique_ptr<Engine> engine;
    {
      const std::lock_guard<std::mutex> held(lock_);
      if (!idle_.empty()) {
        engine = std::move(idle_.back());
        idle_.pop_back();
      }
    }
    if (!engine) engine = backend_->make_engine();
    Engine* const lent = engine.release();
    return {lent, [all = shared_from_this()](Engine* back) { all->take_back(std::unique_ptr<Engine>(back)); }};
  }

 private:
  std::shared_ptr<const Backend> backend_;
  std::mutex lock_;
  std::vector<std::unique_ptr<Engine>> idle_;

  void take_back(std::unique_ptr<Engine> engine) noexcept {
    try {
      const std::lock_guard<std::mutex> held(lock_);
      idle_.push_back(std::move(engine));
    } catch (...) {  // without memory for its place in the list it is freed
    }
  }
};

/// A call of an engine: when it began and ended, in seconds of the clock that Python's perf_counter has.
struct Call {
  const char* name;
  double begin, end;
};

/// An engine that notes its calls, and looks every now and then whether somebody wants to stop it.
class Observed final : public Engine {
 public:
  /// `interrupted` throws where the work must stop.
  Observed(Engine& engine, std::vector<Call>* calls, void (*interrupted)())
      : engine_(engine), calls_(calls), interrupted_(interrupted), looked_(now()) {}

  const ModelInfo& model() const override { return engine_.model(); }
  const Limits& limits() const override { return engine_.limits(); }
  bool attention() const override { return engine_.attention(); }
  std::int64_t best(std::int64_t beams, const State& state) const override { return engine_.best(beams, state); }
  std::unique_ptr<State> encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                                const Outlook& outlook) override {
    const double begin = now();
    auto state = engine_.encode(src_ids, src_lengths, outlook);
    note("encode", begin);
    return state;
  }
  void step(const std::vector<std::int32_t>& tokens, State& state, bool full, bool attention,
            Scores& scores) override {
    const double begin = now();
    if (begin - looked_ > look_seconds) {
      interrupted_();
      looked_ = begin;
    }
    engine_.step(tokens, state, full, attention, scores);
    note("step", begin);
  }
  void reorder(State& state, const std::vector<std::int32_t>& parents,
               const std::vector<std::int32_t>& sentences) override {
    const double begin = now();
    engine_.reorder(state, parents, sentences);
    note("reorder", begin);
  }
  std::vector<std::vector<float>> cross_keys_values(const State& state) const override {
    return engine_.cross_keys_values(state);
  }

 private:
  static constexpr double look_seconds = 0.05;

  Engine& engine_;
  std::vector<Call>* calls_;
  void (*interrupted_)();
  double looked_;

  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  void note(const char* name, double begin) {
    if (calls_) calls_->push_back({name, begin, now()});
  }
};

}  // namespace tformer::python
