#include "log.hpp"

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "text/unicode.hpp"

namespace tformer {
namespace {

std::atomic<bool> there{false};
std::mutex lock;

std::shared_ptr<const Log>& current() {
  static auto* const kept = new std::shared_ptr<const Log>;  // never freed: threads may log at the end of the process
  return *kept;
}

}  // namespace

void set_log(Log log) {
  std::shared_ptr<const Log> next = log ? std::make_shared<const Log>(std::move(log)) : nullptr;
  const std::lock_guard<std::mutex> held(lock);  // which ends before `next`, by then the old one
  there = next != nullptr;
  current().swap(next);
}

bool logs() { return there.load(std::memory_order_relaxed); }

void write_log(Level level, const std::string& message) {
  std::shared_ptr<const Log> log;
  {
    const std::lock_guard<std::mutex> held(lock);
    log = current();
  }
  if (log) (*log)(level, one_line(message));
}

}  // namespace tformer
