// Threads that work on the same list of stages. Nobody waits for a thread that has not come: pieces are claimed one by
// one, by whoever is there. Each thread begins with the same share of a stage every time, as its caches are still near.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tformer::native {

/// Work in stages, each of which begins when the one before it is done.
class Job {
 public:
  virtual ~Job() = default;
  virtual std::size_t stages() const = 0;
  /// How many parts of a stage can be done at the same time; asked when the stages before it are done.
  virtual std::uint32_t pieces(std::size_t stage) const = 0;
  /// Do one part; `worker` is the number of the thread, from 0. Must not throw.
  virtual void piece(std::size_t stage, std::uint32_t piece, int worker) = 0;
};

/// `threads` of which the caller is one. They spin for a moment after a job, then sleep.
class Pool {
 public:
  explicit Pool(int threads);
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool();

  int threads() const { return static_cast<int>(helpers_->threads.size()) + 1; }
  /// Run a job; one caller at a time.
  void run(Job& job);
  /// Have room for the stages of a job.
  void reserve(std::size_t stages);

 private:
  /// On a line of its own.
  struct Count {
    alignas(64) std::atomic<std::uint32_t> of{0};
  };

  std::vector<Count> done_;     // pieces of each stage
  std::vector<Count> claimed_;  // (stages, threads) pieces of each thread's share
  Job* job_ = nullptr;
  alignas(64) std::atomic<std::uint64_t> epoch_{0};  // odd: a job is open
  alignas(64) std::atomic<int> inside_{0};           // helpers that may touch the job
  alignas(64) std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
  struct Helpers {
    std::mutex lock;
    std::condition_variable wake;
    std::vector<std::thread> threads;
  };
  std::unique_ptr<Helpers> helpers_ = std::make_unique<Helpers>();
  const long process_;  // that has the helpers: a fork of it has none

  void walk(int worker);
  void help(int worker);
  bool wait(std::uint64_t seen);
};

}  // namespace tformer::native
