#include "trt/library.hpp"

#include <NvInferRuntime.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <mutex>
#include <optional>

#include "errors.hpp"
#include "ort/library.hpp"
#include "trt/cuda.hpp"
#include "trt/open.hpp"

namespace fs = std::filesystem;

namespace tformer {
namespace {

using Factory = void* (*)(void* logger, std::int32_t version);
using Number = std::int32_t (*)();
constexpr std::int32_t rtx_major = 1, rtx_interface = 11;  // TensorRT for RTX 1 has the interface of TensorRT 11

Error missing(const std::string& what) { return Error(Status::missing, what); }

std::string major_text() { return std::to_string(NV_TENSORRT_MAJOR); }

/// What the files of a TensorRT that fits the headers are called.
std::vector<std::string> names() {
  std::vector<std::string> all = {"libnvinfer.so." + major_text()};
  if (NV_TENSORRT_MAJOR == rtx_interface) all.push_back("libtensorrt_rtx.so." + std::to_string(rtx_major));
  return all;
}

/// The files in a folder, or the file itself; both flavors may be in one.
std::vector<std::string> files_of(const fs::path& place) {
  std::error_code problem;
  if (!fs::is_directory(place, problem)) return {place.string()};
  std::vector<std::string> found;
  const std::vector<std::string> fitting = names();
  for (const char* name : {"libnvinfer.so", "libtensorrt_rtx.so"}) {
    std::string chosen;  // the one that fits, else the last of libnvinfer.so, libnvinfer.so.11 and libnvinfer.so.11.4.0
    for (fs::directory_iterator it(place, problem), end; !problem && it != end; it.increment(problem)) {
      const std::string file = it->path().filename().string();
      if (file.rfind(name, 0) != 0) continue;
      chosen = std::max(chosen, it->path().string());
      if (std::count(fitting.begin(), fitting.end(), file)) {
        chosen = it->path().string();
        break;
      }
    }
    if (problem) throw missing(place.string() + " cannot be read: " + problem.message() + ": name the file");
    if (!chosen.empty()) found.push_back(chosen);
  }
  if (found.empty()) throw missing(place.string() + " has no libnvinfer.so and no libtensorrt_rtx.so: name the file");
  return found;
}

template <typename Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(::dlsym(library, name));
}

}  // namespace

TensorRt::TensorRt(void* library, const std::string& path)
    : factory_(::dlsym(library, "createInferRuntime_INTERNAL")) {
  const auto number = symbol<Number>(library, "getInferLibVersion");
  if (!number || !factory_) throw missing(path + " is not TensorRT: it has no getInferLibVersion");
  const std::int32_t version = number();
  const std::int32_t scale = version < 10000 ? 1000 : 10000;  // 8.6.1 is 8601, 10.0.1 is 100001
  const std::int32_t major = version / scale, rest = version % scale;
  const bool rtx = major == rtx_major;
  name_ = rtx ? "TensorRT for RTX" : "TensorRT";
  shorter_ = std::to_string(major) + "." + std::to_string(rest / 100) + "." + std::to_string(rest % 100);
  const auto build = symbol<Number>(library, "getInferLibBuildVersion");
  version_ = build ? shorter_ + "." + std::to_string(build()) : shorter_;
  const std::int32_t interface = rtx ? rtx_interface : major;
  if (interface != NV_TENSORRT_MAJOR) {
    throw missing(path + " is " + title() + ", and this libtformer was built with the headers of TensorRT " +
                  major_text() + ": build it with -DTensorRT_ROOT of " + std::to_string(interface) +
                  ", or install TensorRT " + major_text());
  }
}

std::vector<Stamp> TensorRt::stamps(const std::string& capability, const std::string& precision) const {
  const bool rtx = for_rtx();
  std::vector<std::string> capabilities;
  if (!rtx) capabilities.push_back(capability);
  if (std::stoi(capability.substr(2)) >= 80) capabilities.push_back("sm80+");
  std::vector<std::string> titles = {title()};
  if (shorter_ != version_) titles.push_back(name_ + " " + shorter_);  // as packages without a build's number call it
  if (!rtx) titles.push_back(name_ + " " + major_text());              // version-compatible plans
  std::vector<Stamp> found;
  for (const std::string& each : titles) {
    for (const std::string& own : capabilities) found.push_back({own, each, precision});
  }
  return found;
}

int TensorRt::oldest_driver() { return NV_TENSORRT_MAJOR >= rtx_interface ? 12000 : 11040; }

std::string tensorrt_headers() {
  return major_text() + "." + std::to_string(NV_TENSORRT_MINOR) + "." + std::to_string(NV_TENSORRT_PATCH);
}

std::vector<TensorRt> load_tensorrt(const std::string& place) {
  const char* named = std::getenv("TFORMER_TENSORRT");
  const std::string wanted = place.empty() && named ? named : place;
  std::vector<TensorRt> found;
  std::string said;
  std::optional<Error> unfit;
  for (const std::string& file : wanted.empty() ? names() : files_of(wanted)) {
    if (void* library = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      try {
        found.emplace_back(library, file);
      } catch (const Error& error) {
        unfit = error;
      }
    } else if (const char* why = ::dlerror(); said.empty() && why) {
      said = why;
    }
  }
  if (!found.empty()) return found;
  if (unfit) throw *unfit;
  throw missing("TensorRT cannot be loaded (" + said + "): install TensorRT " + major_text() + ", and name its " +
                names().front() + " in TFORMER_TENSORRT");
}

/// Collects errors, from whatever thread they come.
class TrtRuntime::Collector final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, nvinfer1::AsciiChar const* message) noexcept override {
    if (severity > Severity::kERROR) return;
    try {
      const std::lock_guard<std::mutex> held(lock_);
      text_ += (text_.empty() ? "" : "; ") + std::string(message);
    } catch (const std::exception&) {  // without memory there is no message
    }
  }
  std::string taken() {
    const std::lock_guard<std::mutex> held(lock_);
    return text_.empty() ? "it gives no reason" : reason(std::exchange(text_, ""));
  }

 private:
  std::mutex lock_;
  std::string text_;
};

TrtRuntime::TrtRuntime(const TensorRt& tensorrt)
    : title_(tensorrt.title()), rtx_(tensorrt.for_rtx()), log_(std::make_unique<Collector>()) {
  const auto make = reinterpret_cast<Factory>(tensorrt.factory());
  void* made = make(log_.get(), NV_TENSORRT_VERSION);
  // Where the driver is too old TensorRT gives the address of a member of nothing.
  if (reinterpret_cast<std::uintptr_t>(made) < 65536) {
    throw Error(Status::engine, title_ + " does not begin: " + reasons() + ": is the driver new enough for it?");
  }
  runtime_.reset(static_cast<nvinfer1::IRuntime*>(made));
  runtime_->setEngineHostCodeAllowed(true);  // version-compatible plans hold code
}

bool is_full(const std::string& reasons) {
  return reasons.find("ut of memory") != std::string::npos || reasons.find("OutOfMemory") != std::string::npos;
}

TrtRuntime::~TrtRuntime() { delete_on_gpu(runtime_.release()); }

std::string TrtRuntime::reasons() const { return log_->taken(); }

std::shared_ptr<nvinfer1::ICudaEngine> TrtRuntime::load(const Content& plan, const std::string& path) const {
  nvinfer1::ICudaEngine* loaded = runtime_->deserializeCudaEngine(plan.data(), plan.size());
  if (loaded) return {loaded, delete_on_gpu<nvinfer1::ICudaEngine>};
  const std::string said = reasons();
  throw Error(is_full(said) ? Status::no_memory : Status::engine, title_ + " cannot load " + path + ": " + said);
}

}  // namespace tformer
