#include "native/pool.hpp"

#include <cfenv>
#include <chrono>
#include <exception>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "system.hpp"

namespace tformer::native {
namespace {

constexpr auto spin = std::chrono::microseconds(100);  // about what a search takes between two steps
constexpr int looks = 64, patience = 2000;             // pauses between two looks at the clock; before another may run

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");  // about as long as x86's pause; `yield` takes no time on most processors
#else
  std::this_thread::yield();
#endif
}

/// Default rounding, no traps and no flushing for as long as it lives, whatever the calling thread has set.
class FloatEnvironment {
 public:
  FloatEnvironment() {
    std::fegetenv(&kept_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~FloatEnvironment() { std::fesetenv(&kept_); }
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  std::fenv_t kept_;
};

}  // namespace

Pool::Pool(int threads) : process_(system::process()) {
  helpers_->threads.reserve(static_cast<std::size_t>(threads));
  try {
    for (int i = 1; i < threads; ++i) helpers_->threads.emplace_back([this, i] { help(i); });
  } catch (const std::exception&) {  // the system gives no more threads, or memory for one: fewer do the same
  }
}

Pool::~Pool() {
  if (system::process() != process_) {  // nobody is there to wait for, and a condition that has waiters is not destroyed
    static_cast<void>(helpers_.release());
    return;
  }
  {
    const std::lock_guard<std::mutex> held(helpers_->lock);
    stop_ = true;
  }
  helpers_->wake.notify_all();
  for (std::thread& helper : helpers_->threads) helper.join();
}

void Pool::reserve(std::size_t stages) {
  if (stages <= done_.size()) return;
  done_ = std::vector<Count>(stages);
  claimed_ = std::vector<Count>(stages * static_cast<std::size_t>(threads()));
}

void Pool::run(Job& job) {
  const FloatEnvironment numbers;
  if (threads() == 1 || system::process() != process_) {  // a fork has no helpers, and a lock may be held by one
    for (std::size_t stage = 0; stage < job.stages(); ++stage) {
      const std::uint32_t count = job.pieces(stage);
      for (std::uint32_t piece = 0; piece < count; ++piece) job.piece(stage, piece, 0);
    }
    return;
  }
  reserve(job.stages());
  const std::size_t claims = job.stages() * static_cast<std::size_t>(threads());
  for (std::size_t i = 0; i < claims; ++i) claimed_[i].of.store(0, std::memory_order_relaxed);
  for (std::size_t i = 0; i < job.stages(); ++i) done_[i].of.store(0, std::memory_order_relaxed);
  job_ = &job;
  epoch_.fetch_add(1);
  if (asleep_.load() > 0) {
    const std::lock_guard<std::mutex> held(helpers_->lock);
    helpers_->wake.notify_all();
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
  const auto count = job.stages(), all = static_cast<std::size_t>(threads());
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t pieces = job.pieces(i);
    std::uint32_t mine = 0;
    for (std::size_t k = 0; k < all; ++k) {  // its own share first, then what others leave
      const std::size_t owner = (static_cast<std::size_t>(worker) + k) % all;
      const auto first = static_cast<std::uint32_t>((pieces * owner + all - 1) / all);
      const auto share = static_cast<std::uint32_t>((pieces * (owner + 1) + all - 1) / all) - first;
      std::atomic<std::uint32_t>& claimed = claimed_[i * all + owner].of;
      while (claimed.load(std::memory_order_relaxed) < share) {
        const std::uint32_t piece = claimed.fetch_add(1, std::memory_order_relaxed);
        if (piece >= share) break;
        job.piece(i, first + piece, worker);
        ++mine;
      }
    }
    std::atomic<std::uint32_t>& done = done_[i].of;
    if (mine) done.fetch_add(mine, std::memory_order_acq_rel);
    for (int spins = 0; done.load(std::memory_order_acquire) < pieces; ++spins) {
      pause();
      if (spins % patience == patience - 1) std::this_thread::yield();
    }
  }
}

void Pool::help(int worker) {
  const FloatEnvironment numbers;
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
  std::unique_lock<std::mutex> held(helpers_->lock);
  asleep_.fetch_add(1);
  helpers_->wake.wait(held, [&] { return stop_.load() || open(); });
  asleep_.fetch_sub(1);
  return !stop_.load();
}

}  // namespace tformer::native
