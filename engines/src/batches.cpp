#include "batches.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

namespace tformer {

std::vector<std::vector<std::size_t>> length_batches(const std::vector<std::size_t>& lengths, std::size_t batch_tokens,
                                                     const std::function<std::size_t(std::size_t)>& most) {
  std::vector<std::size_t> order;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    if (lengths[i]) order.push_back(i);
  }
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return lengths[a] > lengths[b]; });
  std::vector<std::vector<std::size_t>> batches;
  for (std::size_t start = 0; start < order.size();) {
    const std::size_t longest = lengths[order[start]], fitting = std::min(most(longest), batch_tokens / longest);
    const std::size_t end = std::min(order.size(), start + std::max<std::size_t>(1, fitting));
    batches.emplace_back(order.begin() + static_cast<std::ptrdiff_t>(start),
                         order.begin() + static_cast<std::ptrdiff_t>(end));
    start = end;
  }
  return batches;
}

Batch make_batch(const std::vector<std::vector<std::int32_t>>& sources, const std::vector<std::size_t>& indices,
                 std::int32_t pad_id, std::int64_t first) {
  std::size_t width = 0;
  for (const std::size_t i : indices) width = std::max(width, sources[i].size());
  Batch batch;
  batch.src_ids.assign(indices.size() * width, pad_id);
  for (std::size_t row = 0; row < indices.size(); ++row) {
    const std::vector<std::int32_t>& source = sources[indices[row]];
    std::copy(source.begin(), source.end(), batch.src_ids.begin() + static_cast<std::ptrdiff_t>(row * width));
    batch.src_lengths.push_back(static_cast<std::int32_t>(source.size()));
    batch.numbers.push_back(first + static_cast<std::int64_t>(indices[row]));
  }
  return batch;
}

void side_by_side(std::size_t count, std::size_t workers, const std::function<void(std::size_t, std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::size_t failed = count;  // the item that threw it
  std::mutex lock;
  const auto run = [&](std::size_t worker) {
    for (std::size_t item; (item = next++) < count;) {
      try {
        work(worker, item);
      } catch (...) {
        next = count;
        const std::lock_guard<std::mutex> held(lock);
        if (item < failed) failure = std::current_exception();
        failed = std::min(failed, item);
      }
    }
  };
  std::vector<std::thread> threads;
  try {
    for (std::size_t worker = 1; worker < std::min(workers, count); ++worker) threads.emplace_back(run, worker);
  } catch (const std::exception&) {  // no memory or room for more threads: continue with those that have started
  }
  run(0);
  for (std::thread& thread : threads) thread.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tformer
