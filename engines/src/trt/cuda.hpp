// The CUDA driver API, loaded at run time: the calls that plans need, with exceptions for errors and owners for memory.
//
// Everything uses the primary context of the first GPU, which TensorRT and other users of the CUDA runtime share.
// An object may be used and freed by any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

struct CUstream_st;
struct CUevent_st;
struct CUgraphExec_st;

namespace tformer {

/// The first GPU of the host.
struct Gpu {
  std::string name;
  std::string capability;  ///< compute capability, such as sm90
};

/// Load the driver, which must support CUDA version `oldest`, such as 12000, and find a GPU; `wanted_by` is for
/// the message. Throws Error that says which of driver, version and GPU is missing.
Gpu find_gpu(const std::string& wanted_by, int oldest);

/// Makes the GPU current for this thread while it lives. TensorRT's own calls need it too.
class OnGpu {
 public:
  OnGpu();
  ~OnGpu();
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;
};

/// Run something that frees GPU resources.
template <typename Object>
void delete_on_gpu(Object* object) noexcept {
  try {
    const OnGpu on;
    delete object;
  } catch (...) {  // if the GPU is gone, nothing can be freed
  }
}

/// A block of device memory, uninitialized.
class Memory {
 public:
  explicit Memory(std::size_t size);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  const std::size_t size;
  std::uint64_t address = 0;
};

/// A zeroed block of pinned host memory, for asynchronous copies.
class Pinned {
 public:
  explicit Pinned(std::size_t size);
  ~Pinned();
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;

  std::uint8_t* bytes = nullptr;
};

/// A CUDA stream. Calls need an OnGpu.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  /// Wait until all is done.
  void wait();
  /// Copy the first `size` bytes of `source`.
  void to_device(std::uint64_t address, const Pinned& source, std::size_t size);
  /// Copy `size` bytes.
  void to_host(Pinned& target, std::uint64_t address, std::size_t size);
  /// Fill with zeros.
  void clear(const Memory& memory);

  CUstream_st* handle = nullptr;
};

/// A CUDA graph.
class Graph {
 public:
  /// Capture what `work` enqueues, without running it.
  Graph(Stream& stream, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  /// Enqueue it on its stream.
  void launch();

 private:
  Stream& stream_;
  CUgraphExec_st* executable_ = nullptr;
};

/// A CUDA event.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  /// Record it on a stream.
  void record(Stream& stream);
  /// Wait for it.
  void wait();

 private:
  CUevent_st* handle_ = nullptr;
};

}  // namespace tformer
