#include "trt/cuda.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "errors.hpp"

struct CUgraph_st;
struct CUctx_st;

namespace tformer {
namespace {

constexpr int no_room = 2;              // CUDA_ERROR_OUT_OF_MEMORY
constexpr int not_loaded = 34;          // CUDA_ERROR_STUB_LIBRARY: a toolkit's libcuda.so, not a driver's
constexpr unsigned non_blocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned no_timing = 2;       // CU_EVENT_DISABLE_TIMING
constexpr int thread_local_capture = 1; // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
constexpr int capability_major = 75, capability_minor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_...

/// Entry points of libcuda.so.1, as cuda.h declares them; each returns a CUresult.
struct Driver {
  int (*cuInit)(unsigned flags);
  int (*cuDriverGetVersion)(int* version);
  int (*cuGetErrorName)(int error, const char** name);
  int (*cuGetErrorString)(int error, const char** text);
  int (*cuDeviceGetCount)(int* count);
  int (*cuDeviceGet)(int* device, int ordinal);
  int (*cuDeviceGetName)(char* name, int size, int device);
  int (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  int (*cuDevicePrimaryCtxRetain)(CUctx_st** context, int device);
  int (*cuCtxPushCurrent)(CUctx_st* context);
  int (*cuCtxPopCurrent)(CUctx_st** context);
  int (*cuMemAlloc)(std::uint64_t* address, std::size_t size);
  int (*cuMemFree)(std::uint64_t address);
  int (*cuMemHostAlloc)(void** address, std::size_t size, unsigned flags);
  int (*cuMemFreeHost)(void* address);
  int (*cuMemcpyHtoDAsync)(std::uint64_t target, const void* source, std::size_t size, CUstream_st* stream);
  int (*cuMemcpyDtoHAsync)(void* target, std::uint64_t source, std::size_t size, CUstream_st* stream);
  int (*cuMemsetD8Async)(std::uint64_t target, unsigned char value, std::size_t size, CUstream_st* stream);
  int (*cuStreamCreate)(CUstream_st** stream, unsigned flags);
  int (*cuStreamSynchronize)(CUstream_st* stream);
  int (*cuStreamDestroy)(CUstream_st* stream);
  int (*cuStreamBeginCapture)(CUstream_st* stream, int mode);
  int (*cuStreamEndCapture)(CUstream_st* stream, CUgraph_st** graph);
  int (*cuGraphInstantiate)(CUgraphExec_st** executable, CUgraph_st* graph, unsigned long long flags);
  int (*cuGraphDestroy)(CUgraph_st* graph);
  int (*cuGraphLaunch)(CUgraphExec_st* executable, CUstream_st* stream);
  int (*cuGraphExecDestroy)(CUgraphExec_st* executable);
  int (*cuEventCreate)(CUevent_st** event, unsigned flags);
  int (*cuEventRecord)(CUevent_st* event, CUstream_st* stream);
  int (*cuEventSynchronize)(CUevent_st* event);
  int (*cuEventDestroy)(CUevent_st* event);
};

Driver cuda;
CUctx_st* context = nullptr;  // retained once, until the process ends

template <typename Function>
void find(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

/// The driver's entry points; an old driver lacks some.
void find_all(void* library) {
#define TFORMER_FIND(member, version) find(library, cuda.member, #member version)
  TFORMER_FIND(cuInit, "");
  TFORMER_FIND(cuDriverGetVersion, "");
  TFORMER_FIND(cuGetErrorName, "");
  TFORMER_FIND(cuGetErrorString, "");
  TFORMER_FIND(cuDeviceGetCount, "");
  TFORMER_FIND(cuDeviceGet, "");
  TFORMER_FIND(cuDeviceGetName, "");
  TFORMER_FIND(cuDeviceGetAttribute, "");
  TFORMER_FIND(cuDevicePrimaryCtxRetain, "");
  TFORMER_FIND(cuCtxPushCurrent, "_v2");
  TFORMER_FIND(cuCtxPopCurrent, "_v2");
  TFORMER_FIND(cuMemAlloc, "_v2");
  TFORMER_FIND(cuMemFree, "_v2");
  TFORMER_FIND(cuMemHostAlloc, "");
  TFORMER_FIND(cuMemFreeHost, "");
  TFORMER_FIND(cuMemcpyHtoDAsync, "_v2");
  TFORMER_FIND(cuMemcpyDtoHAsync, "_v2");
  TFORMER_FIND(cuMemsetD8Async, "");
  TFORMER_FIND(cuStreamCreate, "");
  TFORMER_FIND(cuStreamSynchronize, "");
  TFORMER_FIND(cuStreamDestroy, "_v2");
  TFORMER_FIND(cuStreamBeginCapture, "_v2");
  TFORMER_FIND(cuStreamEndCapture, "");
  TFORMER_FIND(cuGraphInstantiate, "WithFlags");
  TFORMER_FIND(cuGraphDestroy, "");
  TFORMER_FIND(cuGraphLaunch, "");
  TFORMER_FIND(cuGraphExecDestroy, "");
  TFORMER_FIND(cuEventCreate, "");
  TFORMER_FIND(cuEventRecord, "");
  TFORMER_FIND(cuEventSynchronize, "");
  TFORMER_FIND(cuEventDestroy, "_v2");
#undef TFORMER_FIND
}

/// Throws Error, Status::no_memory where memory is full.
void call(int error, const char* function) {
  if (error == 0) return;
  const char* text = nullptr;
  cuda.cuGetErrorString(error, &text);
  const std::string reason = std::string("CUDA stopped in ") + function + ": " + (text ? text : "unknown error");
  if (error == no_room) throw Error(Status::no_memory, reason + ": use fewer workers, or plans of smaller profiles");
  throw Error(Status::engine, reason);
}

#define TFORMER_CALL(function, ...) call(cuda.function(__VA_ARGS__), #function)

/// Free a resource; failures were reported by an earlier call, or the process is ending.
template <typename Function, typename Handle>
void release(Function function, Handle handle) noexcept {
  CUctx_st* own = nullptr;
  if (!handle || cuda.cuCtxPushCurrent(context) != 0) return;
  function(handle);
  cuda.cuCtxPopCurrent(&own);
}

std::string dotted(int version) { return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10); }

/// The CUDA version that the driver supports; 0: no driver is loaded.
int driver_version() {
  int version = 0;
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return 0;
  find_all(library);
  if (!cuda.cuDriverGetVersion || cuda.cuDriverGetVersion(&version) != 0) return 0;
  return version;
}

}  // namespace

Gpu find_gpu(const std::string& wanted_by, int oldest) {
  static std::mutex lock;
  const std::lock_guard<std::mutex> held(lock);
  const auto missing = [&wanted_by](const std::string& what) {
    return Error(Status::missing, wanted_by + " needs a GPU, and " + what);
  };
  static const int version = driver_version();
  if (!version) throw missing("no NVIDIA driver is loaded here: install or start it");
  if (version < oldest) {
    throw Error(Status::missing, "the NVIDIA driver knows CUDA up to " + dotted(version) + ", and " + wanted_by +
                                     " needs " + dotted(oldest) + ": update the driver");
  }
  int count = 0, device = 0, major = 0, minor = 0, error = cuda.cuInit(0);
  if (error == not_loaded) throw missing("no NVIDIA driver is loaded here: install or start it");
  if (!error) error = cuda.cuDeviceGetCount(&count);
  if (error || !count) {
    const char* name = nullptr;
    if (error) cuda.cuGetErrorName(error, &name);
    throw missing(std::string("there is none here (") + (name ? name : "no device") + ")");
  }
  char name[256] = {};
  TFORMER_CALL(cuDeviceGet, &device, 0);
  TFORMER_CALL(cuDeviceGetName, name, sizeof name - 1, device);
  TFORMER_CALL(cuDeviceGetAttribute, &major, capability_major, device);
  TFORMER_CALL(cuDeviceGetAttribute, &minor, capability_minor, device);
  if (!context) TFORMER_CALL(cuDevicePrimaryCtxRetain, &context, device);
  return {name, "sm" + std::to_string(major) + std::to_string(minor)};
}

OnGpu::OnGpu() { TFORMER_CALL(cuCtxPushCurrent, context); }

OnGpu::~OnGpu() {
  CUctx_st* own = nullptr;
  cuda.cuCtxPopCurrent(&own);
}

Memory::Memory(std::size_t bytes) : size(std::max<std::size_t>(bytes, 1)) { TFORMER_CALL(cuMemAlloc, &address, size); }

Memory::~Memory() { release(cuda.cuMemFree, address); }

Pinned::Pinned(std::size_t size) {
  void* memory = nullptr;
  TFORMER_CALL(cuMemHostAlloc, &memory, std::max<std::size_t>(size, 1), 0);
  bytes = static_cast<std::uint8_t*>(memory);
  std::memset(bytes, 0, size);
}

Pinned::~Pinned() { release(cuda.cuMemFreeHost, bytes); }

Stream::Stream() { TFORMER_CALL(cuStreamCreate, &handle, non_blocking); }

Stream::~Stream() { release(cuda.cuStreamDestroy, handle); }

void Stream::wait() { TFORMER_CALL(cuStreamSynchronize, handle); }

void Stream::to_device(std::uint64_t address, const Pinned& source, std::size_t size) {
  TFORMER_CALL(cuMemcpyHtoDAsync, address, source.bytes, size, handle);
}

void Stream::to_host(Pinned& target, std::uint64_t address, std::size_t size) {
  TFORMER_CALL(cuMemcpyDtoHAsync, target.bytes, address, size, handle);
}

void Stream::clear(const Memory& memory) { TFORMER_CALL(cuMemsetD8Async, memory.address, 0, memory.size, handle); }

Graph::Graph(Stream& stream, const std::function<void()>& work) : stream_(stream) {
  CUgraph_st* graph = nullptr;
  TFORMER_CALL(cuStreamBeginCapture, stream.handle, thread_local_capture);
  try {
    work();
  } catch (...) {
    if (cuda.cuStreamEndCapture(stream.handle, &graph) == 0 && graph) cuda.cuGraphDestroy(graph);
    throw;
  }
  TFORMER_CALL(cuStreamEndCapture, stream.handle, &graph);
  const int error = cuda.cuGraphInstantiate(&executable_, graph, 0);
  cuda.cuGraphDestroy(graph);
  call(error, "cuGraphInstantiate");
}

Graph::~Graph() { release(cuda.cuGraphExecDestroy, executable_); }

void Graph::launch() { TFORMER_CALL(cuGraphLaunch, executable_, stream_.handle); }

Event::Event() { TFORMER_CALL(cuEventCreate, &handle_, no_timing); }

Event::~Event() { release(cuda.cuEventDestroy, handle_); }

void Event::record(Stream& stream) { TFORMER_CALL(cuEventRecord, handle_, stream.handle); }

void Event::wait() { TFORMER_CALL(cuEventSynchronize, handle_); }

}  // namespace tformer
