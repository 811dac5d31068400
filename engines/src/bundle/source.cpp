#include "bundle/source.hpp"

namespace tformer {

std::optional<Content> Source::read(const std::string& name) {
  const std::lock_guard<std::mutex> held(lock_);
  if (const auto found = kept_.find(name); found != kept_.end()) return found->second;
  std::optional<Content> content = read_(name);
  if (keeping_) kept_[name] = content;
  return content;
}

std::shared_ptr<const void> Source::keep() {
  {
    const std::lock_guard<std::mutex> held(lock_);
    ++keeping_;
  }
  return {this, [](Source* it) {
            std::map<std::string, std::optional<Content>> unused;  // freed without the lock, by callbacks
            const std::lock_guard<std::mutex> held(it->lock_);
            if (--it->keeping_ == 0) unused.swap(it->kept_);
          }};
}

}  // namespace tformer
