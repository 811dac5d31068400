// TensorRT, loaded at run time: which one, and plans that it has loaded. No type of it is needed to read this header.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "trt/plans.hpp"

namespace nvinfer1 {
class ICudaEngine;
class IRuntime;
}  // namespace nvinfer1

namespace tformer {

/// One that is loaded, TensorRT or TensorRT for RTX; never unloaded.
class TensorRt {
 public:
  TensorRt(void* library, const std::string& path);

  /// As people call it, such as TensorRT 11.4.0.106.
  std::string title() const { return name_ + " " + version_; }
  bool for_rtx() const { return name_ != "TensorRT"; }
  /// What plans may be of that a GPU of that capability runs, those that were made for it first; or nothing.
  std::vector<Stamp> stamps(const std::string& capability, const std::string& precision) const;
  /// The version of CUDA that a driver must know.
  static int oldest_driver();
  /// What makes a runtime; it crashes where there is no GPU.
  void* factory() const { return factory_; }

 private:
  void* factory_;
  std::string name_, version_, shorter_;
};

/// Those that are here: of `place`, a file or the folder that has it; where that is empty, of the environment variable
/// TFORMER_TENSORRT, or what the loader finds. Throws Error where there is none, and for another version than that of
/// the headers that this library was built with.
std::vector<TensorRt> load_tensorrt(const std::string& place);

/// Whether the device's memory is what TensorRT complains of.
bool is_full(const std::string& reasons);

/// What loads plans, and the list of what it complains of. Needs an OnGpu.
class TrtRuntime {
 public:
  explicit TrtRuntime(const TensorRt& tensorrt);
  ~TrtRuntime();
  TrtRuntime(const TrtRuntime&) = delete;
  TrtRuntime& operator=(const TrtRuntime&) = delete;

  /// A plan in the device's memory; it must go before this. Throws Error, Status::no_memory where there is no room.
  std::shared_ptr<nvinfer1::ICudaEngine> load(const std::filesystem::path& plan) const;
  const std::string& title() const { return title_; }
  bool for_rtx() const { return rtx_; }
  /// What TensorRT has complained of since this was asked last.
  std::string reasons() const;

 private:
  class Collector;
  std::string title_;
  bool rtx_;
  std::unique_ptr<Collector> log_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
};

}  // namespace tformer
