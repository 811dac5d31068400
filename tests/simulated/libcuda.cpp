// The CUDA driver, late: work is done when somebody waits for it. What a GPU would refuse or do wrong ends the process.
//
// SIMULATED_DRIVER      version of CUDA that it knows, 13010
// SIMULATED_DEVICES     GPUs, 1
// SIMULATED_CAPABILITY  compute capability, 90
// SIMULATED_ROOM        bytes on the device
// SIMULATED_NO_CAPTURE  if set, captured work cannot be made a graph
// SIMULATED_LOG         a file for what was called: L for a graph's launch, E for a wait for an event
#include "libcuda.hpp"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>

using Work = std::function<void()>;

struct CUstream_st {
  std::deque<Work> work;
  bool capturing = false;
  std::vector<Work> captured;
};
struct CUgraph_st {
  std::vector<Work> work;
};
struct CUgraphExec_st : CUgraph_st {};
struct CUevent_st {
  bool done = true;
  CUstream_st* stream = nullptr;
};
struct CUctx_st {};

namespace {

using Blocks = std::map<std::uint64_t, std::size_t>;
enum { ok = 0, invalid = 1, no_room = 2, not_ready = 3, no_device = 100 };

std::recursive_mutex lock;
Blocks device, pinned;
CUctx_st context;
bool begun = false;
thread_local std::vector<CUctx_st*> current;
thread_local int capturing = 0;
std::string called;

long setting(const char* name, long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atol(value) : otherwise;
}

bool inside(const Blocks& blocks, std::uint64_t address, std::size_t size) {
  const std::lock_guard<std::recursive_mutex> held(lock);
  auto block = blocks.upper_bound(address);
  if (block == blocks.begin()) return false;
  --block;
  return address + size <= block->first + block->second;
}

std::uint64_t number(const void* address) { return reinterpret_cast<std::uint64_t>(address); }

void* pointer(std::uint64_t address) { return reinterpret_cast<void*>(address); }

void require(bool holds, const char* what) {
  if (!holds) simulated_fault(what);
}

void require_context() { require(!current.empty(), "no context is this thread's"); }

void give(CUstream_st* stream, Work work) {
  require_context();
  if (stream->capturing) stream->captured.push_back(std::move(work));
  else stream->work.push_back(std::move(work));
}

void run(CUstream_st* stream, const CUevent_st* until) {
  require(!stream->capturing, "waits while it captures");
  while (!stream->work.empty() && !(until && until->done)) {
    const Work work = std::move(stream->work.front());
    stream->work.pop_front();
    work();
  }
}

int allocate(Blocks& blocks, std::size_t size, std::uint64_t* address) {
  require_context();
  require(!capturing, "takes memory while it captures");
  const std::lock_guard<std::recursive_mutex> held(lock);
  std::size_t taken = size;
  for (const auto& [unused, bytes] : blocks) taken += bytes;
  if (&blocks == &device && taken > static_cast<std::size_t>(setting("SIMULATED_ROOM", 1L << 33))) return no_room;
  void* memory = std::aligned_alloc(256, (size + 255) / 256 * 256);
  std::memset(memory, 0xFF, size);  // not a number in any type
  *address = number(memory);
  blocks[*address] = size;
  return ok;
}

int release(Blocks& blocks, std::uint64_t address) {
  require_context();
  const std::lock_guard<std::recursive_mutex> held(lock);
  require(blocks.erase(address) == 1, "frees what it has not");
  std::free(pointer(address));
  return ok;
}

int copy(CUstream_st* stream, const Blocks& to, std::uint64_t target, const Blocks& from, std::uint64_t source,
         std::size_t size) {
  give(stream, [&to, target, &from, source, size] {
    require(inside(to, target, size) && inside(from, source, size), "copies where there is no such memory by then");
    std::memcpy(pointer(target), pointer(source), size);
  });
  require(inside(to, target, size) && inside(from, source, size), "copies where there is no such memory");
  return ok;
}

void note(char letter) {
  const std::lock_guard<std::recursive_mutex> held(lock);
  called += letter;
}

struct AtEnd {
  ~AtEnd() {
    if (!device.empty() || !pinned.empty()) simulated_fault("memory was not given back");
    if (const char* path = std::getenv("SIMULATED_LOG")) {
      std::FILE* file = std::fopen(path, "w");
      std::fputs(called.c_str(), file);
      std::fclose(file);
    }
  }
} at_end;

}  // namespace

void simulated_fault(const std::string& what) {
  std::fprintf(stderr, "simulated GPU: %s\n", what.c_str());
  ::_exit(86);
}

void simulated_give(CUstream_st* stream, Work work) { give(stream, std::move(work)); }

bool simulated_on_device(const void* address, std::size_t size) { return inside(device, number(address), size); }

bool simulated_has_context() { return !current.empty(); }

extern "C" {

int cuInit(unsigned) {
  if (setting("SIMULATED_DEVICES", 1) == 0) return no_device;
  begun = true;
  return ok;
}
int cuDriverGetVersion(int* version) { return *version = static_cast<int>(setting("SIMULATED_DRIVER", 13010)), ok; }
int cuGetErrorName(int error, const char** name) {
  return *name = error == no_device ? "CUDA_ERROR_NO_DEVICE" : "CUDA_ERROR", ok;
}
int cuGetErrorString(int error, const char** text) {
  return *text = error == no_room ? "out of memory" : "invalid argument", ok;
}
int cuDeviceGetCount(int* count) {
  require(begun, "is asked before cuInit");
  return *count = static_cast<int>(setting("SIMULATED_DEVICES", 1)), ok;
}
int cuDeviceGet(int* number_of, int ordinal) { return *number_of = ordinal, ok; }
int cuDeviceGetName(char* name, int size, int) { return std::snprintf(name, size, "Simulated GPU"), ok; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  const int capability = static_cast<int>(setting("SIMULATED_CAPABILITY", 90));
  return *value = attribute == 75 ? capability / 10 : capability % 10, ok;
}
int cuDevicePrimaryCtxRetain(CUctx_st** found, int) { return *found = &context, ok; }
int cuCtxPushCurrent_v2(CUctx_st* own) { return current.push_back(own), ok; }
int cuCtxPopCurrent_v2(CUctx_st** own) {
  require_context();
  *own = current.back();
  return current.pop_back(), ok;
}
int cuMemAlloc_v2(std::uint64_t* address, std::size_t size) { return allocate(device, size, address); }
int cuMemFree_v2(std::uint64_t address) { return release(device, address); }
int cuMemHostAlloc(void** address, std::size_t size, unsigned) {
  std::uint64_t found = 0;
  const int error = allocate(pinned, size, &found);
  return *address = pointer(found), error;
}
int cuMemFreeHost(void* address) { return release(pinned, number(address)); }
int cuMemcpyHtoDAsync_v2(std::uint64_t target, const void* source, std::size_t size, CUstream_st* stream) {
  return copy(stream, device, target, pinned, number(source), size);
}
int cuMemcpyDtoHAsync_v2(void* target, std::uint64_t source, std::size_t size, CUstream_st* stream) {
  return copy(stream, pinned, number(target), device, source, size);
}
int cuMemsetD8Async(std::uint64_t target, unsigned char value, std::size_t size, CUstream_st* stream) {
  require(inside(device, target, size), "fills where there is no such memory");
  return give(stream, [=] { std::memset(pointer(target), value, size); }), ok;
}
int cuStreamCreate(CUstream_st** stream, unsigned flags) {
  require_context();
  require(flags == 1, "the stream waits for others");
  return *stream = new CUstream_st, ok;
}
int cuStreamSynchronize(CUstream_st* stream) { return run(stream, nullptr), ok; }
int cuStreamDestroy_v2(CUstream_st* stream) {
  require(stream->work.empty(), "a stream goes before its work is done");
  return delete stream, ok;
}
int cuStreamBeginCapture_v2(CUstream_st* stream, int mode) {
  require(!stream->capturing && stream->work.empty() && mode == 1, "a capture begins in the middle of work");
  ++capturing;
  return stream->capturing = true, ok;
}
int cuStreamEndCapture(CUstream_st* stream, CUgraph_st** graph) {
  require(stream->capturing && !stream->captured.empty(), "nothing was captured");
  stream->capturing = false;
  --capturing;
  *graph = new CUgraph_st{std::move(stream->captured)};
  return stream->captured.clear(), ok;
}
int cuGraphInstantiateWithFlags(CUgraphExec_st** executable, CUgraph_st* graph, unsigned long long) {
  if (std::getenv("SIMULATED_NO_CAPTURE")) return invalid;
  return *executable = new CUgraphExec_st{*graph}, ok;
}
int cuGraphDestroy(CUgraph_st* graph) { return delete graph, ok; }
int cuGraphLaunch(CUgraphExec_st* executable, CUstream_st* stream) {
  note('L');
  for (const Work& work : executable->work) give(stream, work);
  return ok;
}
int cuGraphExecDestroy(CUgraphExec_st* executable) { return delete executable, ok; }
int cuEventCreate(CUevent_st** event, unsigned) { return *event = new CUevent_st, ok; }
int cuEventRecord(CUevent_st* event, CUstream_st* stream) {
  event->done = false;
  event->stream = stream;
  return give(stream, [event] { event->done = true; }), ok;
}
int cuEventSynchronize(CUevent_st* event) {
  note('E');
  if (event->stream) run(event->stream, event);
  require(event->done, "waits for what never comes");
  return ok;
}
int cuEventDestroy_v2(CUevent_st* event) { return delete event, ok; }

}  // extern "C"
