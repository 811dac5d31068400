#include "native/pool.hpp"

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tformer::native {
namespace {

constexpr auto spin = std::chrono::microseconds(100);  // about what a search takes between two steps
constexpr int looks = 64, patience = 2000;             // pauses between two looks at the clock; before another may run

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

}  // namespace

Pool::Pool(int threads) {
  for (int i = 1; i < threads; ++i) helpers_.emplace_back([this, i] { help(i); });
}

Pool::~Pool() {
  {
    const std::lock_guard<std::mutex> held(lock_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& helper : helpers_) helper.join();
}

void Pool::reserve(std::size_t stages) {
  if (stages > stages_.size()) stages_ = std::vector<Stage>(stages);
}

void Pool::run(Job& job) {
  if (helpers_.empty()) {
    for (std::size_t stage = 0; stage < job.stages(); ++stage) {
      const std::uint32_t count = job.pieces(stage);
      for (std::uint32_t piece = 0; piece < count; ++piece) job.piece(stage, piece, 0);
    }
    return;
  }
  reserve(job.stages());
  for (std::size_t i = 0; i < job.stages(); ++i) {
    stages_[i].claimed.store(0, std::memory_order_relaxed);
    stages_[i].done.store(0, std::memory_order_relaxed);
  }
  job_ = &job;
  epoch_.fetch_add(1);
  if (asleep_.load() > 0) {
    const std::lock_guard<std::mutex> held(lock_);
    wake_.notify_all();
  }
  walk(0);
  epoch_.fetch_add(1);
  // All pieces are done; whoever is still inside only has to see that.
  for (int spins = 0; inside_.load() > 0; ++spins) {
    pause();
    if (spins % patience == patience - 1) std::this_thread::yield();
  }
}

void Pool::walk(int worker) {
  Job& job = *job_;
  const std::size_t count = job.stages();
  for (std::size_t i = 0; i < count; ++i) {
    Stage& stage = stages_[i];
    const std::uint32_t pieces = job.pieces(i);
    std::uint32_t mine = 0;
    while (stage.claimed.load(std::memory_order_relaxed) < pieces) {
      const std::uint32_t piece = stage.claimed.fetch_add(1, std::memory_order_relaxed);
      if (piece >= pieces) break;
      job.piece(i, piece, worker);
      ++mine;
    }
    if (mine) stage.done.fetch_add(mine, std::memory_order_acq_rel);
    for (int spins = 0; stage.done.load(std::memory_order_acquire) < pieces; ++spins) {
      pause();
      if (spins % patience == patience - 1) std::this_thread::yield();
    }
  }
}

void Pool::help(int worker) {
  std::uint64_t seen = 0;
  while (wait(seen)) {
    inside_.fetch_add(1);
    const std::uint64_t now = epoch_.load();  // after the count, which the caller reads after closing
    if (now % 2 == 1 && now != seen) {
      seen = now;
      walk(worker);
    }
    inside_.fetch_sub(1);
  }
}

/// Until a job is open that has not been seen; false: the pool ends.
bool Pool::wait(std::uint64_t seen) {
  const auto open = [&] {
    const std::uint64_t now = epoch_.load();
    return now % 2 == 1 && now != seen;
  };
  const auto since = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < looks; ++i) {
      if (open()) return true;
      if (stop_.load(std::memory_order_relaxed)) return false;
      pause();
    }
  } while (std::chrono::steady_clock::now() - since < spin);
  std::unique_lock<std::mutex> held(lock_);
  asleep_.fetch_add(1);
  wake_.wait(held, [&] { return stop_.load() || open(); });
  asleep_.fetch_sub(1);
  return !stop_.load();
}

}  // namespace tformer::native
