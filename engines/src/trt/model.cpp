#include "trt/model.hpp"

#include <algorithm>

#include "errors.hpp"
#include "log.hpp"
#include "trt/open.hpp"

namespace tformer {
namespace {

Limits limits_of(const Plans& plans) {
  Limits limits;
  limits.profiles = plans.profiles();
  for (const Profile& each : limits.profiles) {
    limits.batch = std::max(limits.batch, each.batch);
    limits.src_tokens = std::max(limits.src_tokens, each.src_len);
    limits.tgt_tokens = std::max(limits.tgt_tokens, each.capacity);
    limits.beams = std::max(limits.beams, each.beams);
  }
  limits.hint = "build a larger profile too: " + plans.build_command("BATCHxBEAMSxSOURCExTARGET");
  return limits;
}

/// Stamps of plans that this host can run, each with its TensorRT: by precision, then in the order of installations.
std::pair<Plans, TensorRt> chosen(const Bundle& bundle, const std::string& variant, const OpenOptions& options) {
  const std::vector<TensorRt> here = load_tensorrt(options.tensorrt);
  const Gpu gpu = find_gpu(here[0].title(), TensorRt::oldest_driver());
  std::vector<Stamp> wanted;
  std::vector<const TensorRt*> owners;
  for (const std::string& precision : options.variant.empty() ? precisions() : std::vector{options.variant}) {
    for (const TensorRt& each : here) {
      for (const Stamp& stamp : each.stamps(gpu.capability, precision)) {
        wanted.push_back(stamp);
        owners.push_back(&each);
      }
    }
  }
  if (wanted.empty()) {
    throw Error(Status::missing, here[0].title() + " needs a GPU of compute capability 8.0 or later, this one has " +
                                     gpu.capability + ": install TensorRT and build again");
  }
  const std::size_t first = Plans::first(bundle, variant, wanted);
  return {Plans(bundle, variant, wanted[first]), *owners[first]};
}

}  // namespace

std::shared_ptr<const Backend> open_plans(std::shared_ptr<const Bundle> bundle, const OpenOptions& options) {
  const std::string variant = bundle->trt_variant();
  if (!options.variant.empty() && !std::count(precisions().begin(), precisions().end(), options.variant)) {
    throw Error(Status::usage, unknown("variant", options.variant, precisions()));
  }
  if (options.shortlist) {
    throw Error(Status::usage, "shortlist: trt has no graphs for it: use backend ort and a variant of target ort-cpu");
  }
  auto [plans, tensorrt] = chosen(*bundle, variant, options);
  log(Level::info, [&library = tensorrt, &own = plans] {
    return library.title() + " runs plans for " + own.stamp().shown() + ", of " +
           std::to_string(own.profiles().size()) + " profiles";
  });
  return std::make_shared<const TrtModel>(std::move(bundle), std::move(plans), tensorrt);
}

TrtModel::TrtModel(std::shared_ptr<const Bundle> bundle, Plans plans, const TensorRt& tensorrt)
    : bundle_(std::move(bundle)), plans_(std::move(plans)), limits_(limits_of(plans_)) {
  const OnGpu on;
  runtime_ = std::make_unique<const TrtRuntime>(tensorrt);
  for (const char* graph : {"encoder", "decoder_step"}) load(graph, plans_.profiles()[0]);  // fails early
}

const char* TrtModel::warning() const {
  const std::lock_guard<std::mutex> held(lock_);
  return warning_.empty() ? "" : warning_.c_str();
}

std::unique_ptr<Engine> TrtModel::make_engine() const { return make_speculative(shared_from_this()); }

TrtDevice::Plan TrtModel::load(const std::string& graph, const Profile& profile) const {
  const std::string path = plans_.plan(graph, profile).string();
  TrtDevice::Plan& plan = loaded_[path];
  if (!plan) plan = runtime_->load(plans_.read(graph, profile), path);
  return plan;
}

std::unique_ptr<TrtDevice> TrtModel::make(const Profile& profile) const {
  const OnGpu on;
  auto device = std::make_unique<TrtDevice>(*runtime_, profile, load("encoder", profile), load("decoder_step", profile),
                                            cache_names("cross", model()));
  runtime_->reasons();  // drop warnings of what succeeded
  if (warning_.empty() && !device->not_captured().empty()) {
    warning_ = "steps are not replayed as CUDA graphs: " + device->not_captured();
  }
  return device;
}

std::unique_ptr<TrtDevice> TrtModel::take(const Profile& wanted) const {
  auto device = taken(plans_.fitting(wanted));
  if (logs()) {  // behind the lock
    const std::string slow = warning();
    if (!slow.empty() && !told_.exchange(true)) write_log(Level::warning, bundle_->directory().string() + ": " + slow);
  }
  return device;
}

std::unique_ptr<TrtDevice> TrtModel::taken(const Profile& profile) const {
  const std::lock_guard<std::mutex> held(lock_);
  const auto waiting = std::find_if(idle_.begin(), idle_.end(), [&](const std::unique_ptr<TrtDevice>& each) {
    return each->profile.holds(profile) && profile.holds(each->profile);
  });
  if (waiting != idle_.end()) {
    std::unique_ptr<TrtDevice> device = std::move(*waiting);
    idle_.erase(waiting);
    return device;
  }
  try {
    return make(profile);
  } catch (const Error& error) {
    if (error.status != Status::no_memory || idle_.empty()) throw;
  }
  idle_.clear();
  return make(profile);
}

void TrtModel::give_back(std::unique_ptr<TrtDevice> device) const noexcept {
  try {
    const std::lock_guard<std::mutex> held(lock_);
    idle_.push_back(std::move(device));
  } catch (...) {  // without memory for its place in the list it is freed
  }
}

}  // namespace tformer
