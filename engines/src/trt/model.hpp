// The plans of a bundle on this host's GPU: loaded once, with a pool of devices that are reused for later batches.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backend.hpp"
#include "trt/device.hpp"
#include "trt/library.hpp"
#include "trt/plans.hpp"

namespace tformer {

/// Any number of threads may use one.
class TrtModel final : public Backend, public std::enable_shared_from_this<TrtModel> {
 public:
  /// Plans that this host runs, and the TensorRT that runs them. Throws Error.
  TrtModel(std::shared_ptr<const Bundle> bundle, Plans plans, const TensorRt& tensorrt);

  const Model& model() const override { return bundle_->model(); }
  const Limits& limits() const override { return limits_; }
  std::string variant() const override { return plans_.stamp().precision; }
  const char* warning() const override;
  std::unique_ptr<Engine> make_engine() const override;

  /// A free device of the smallest profile that fits a request; where GPU memory is full, idle devices are freed
  /// for it. Throws Error.
  std::unique_ptr<TrtDevice> take(const Profile& wanted) const;
  /// Return a device to the pool when its batch has ended.
  void give_back(std::unique_ptr<TrtDevice> device) const noexcept;

 private:
  std::unique_ptr<TrtDevice> taken(const Profile& profile) const;
  std::unique_ptr<TrtDevice> make(const Profile& profile) const;
  TrtDevice::Plan load(const std::string& graph, const Profile& profile) const;

  const std::shared_ptr<const Bundle> bundle_;
  const Plans plans_;
  Limits limits_;
  std::unique_ptr<const TrtRuntime> runtime_;
  mutable std::mutex lock_;
  mutable std::string warning_;  ///< written once
  mutable std::atomic<bool> told_{false};  ///< whether the log has it
  mutable std::map<std::string, TrtDevice::Plan> loaded_;  ///< by file name
  mutable std::vector<std::unique_ptr<TrtDevice>> idle_;
};

/// An engine over a model's plans, for one thread.
std::unique_ptr<Engine> make_speculative(std::shared_ptr<const TrtModel> model);

}  // namespace tformer
