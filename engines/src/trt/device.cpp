#include "trt/device.hpp"

#include <NvInferRuntime.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "errors.hpp"

namespace tformer {
namespace {

using nvinfer1::DataType;
constexpr std::size_t alignment = 256;  // of tensors that share a block of memory
constexpr std::int32_t bf16 = 7;        // DataType::kBF16, which 8.6 does not have
const std::vector<std::string> given_names = {"src_lengths", "end_id", "live_beams", "src_ids"};
const std::vector<std::string> found_names = {"top_ids", "top_scores"};
enum Part { even, odd, encoder };

bool begins(const std::string& name, const char* with) { return name.rfind(with, 0) == 0; }

std::size_t bytes_of(std::int32_t type, const std::string& name) {
  switch (static_cast<DataType>(type)) {
    case DataType::kFLOAT:
    case DataType::kINT32: return 4;
    case DataType::kHALF: return 2;
    default: break;
  }
  if (type == bf16) return 2;
  throw Error(Status::bundle, "the plans have " + name + " of type " + std::to_string(type) +
                                  ", which none of ours has: export and build again");
}

float half_as_float(std::uint16_t bits) {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16U, exponent = bits >> 10U & 0x1FU;
  const std::uint32_t fraction = bits & 0x3FFU;
  float value = 0;
  if (exponent == 0) {  // 0 and numbers below 2^-14
    value = static_cast<float>(fraction) * 0x1p-24F;
    return sign ? -value : value;
  }
  const std::uint32_t whole = sign | (exponent == 31 ? 0xFFU : exponent + 112U) << 23U | fraction << 13U;
  std::memcpy(&value, &whole, sizeof value);
  return value;
}

}  // namespace

void TrtDevice::Freed::operator()(nvinfer1::IExecutionContext* context) const noexcept { delete_on_gpu(context); }

TrtDevice::TrtDevice(const TrtRuntime& runtime, const Profile& sizes, Plan encoder_plan, Plan step_plan,
                     const std::vector<std::string>& cross)
    : profile(sizes), runtime_(runtime), encoder_(std::move(encoder_plan)), step_(std::move(step_plan)),
      cross_names_(cross) {
  note_tensors(*encoder_);
  note_tensors(*step_);
  fed_ = {"tokens", "parents", "values", "positions"};
  require_tensors();
  best_ = tensors_["top_ids"].shape.back();
  try {
    take_memory();
    prepare(*step_, addresses(0), launches_[even]);
    prepare(*step_, addresses(1), launches_[odd]);
    prepare(*encoder_, addresses(0), launches_[encoder]);
  } catch (...) {
    finish();
    throw;
  }
}

TrtDevice::~TrtDevice() { finish(); }

/// Wait for the device before memory that it writes to is freed.
void TrtDevice::finish() noexcept {
  try {
    const OnGpu on;
    stream_.wait();
  } catch (...) {  // reported by an earlier call
  }
}

void TrtDevice::note_tensors(nvinfer1::ICudaEngine& plan) {
  for (std::int32_t i = 0; i < plan.getNbIOTensors(); ++i) {
    const char* name = plan.getIOTensorName(i);
    const nvinfer1::Dims shape = plan.getTensorShape(name);
    Tensor tensor;
    tensor.type = static_cast<std::int32_t>(plan.getTensorDataType(name));
    tensor.bytes = bytes_of(tensor.type, name);
    for (std::int32_t axis = 0; axis < shape.nbDims; ++axis) {
      tensor.shape.push_back(shape.d[axis]);
      tensor.bytes *= static_cast<std::size_t>(std::max<std::int64_t>(shape.d[axis], 0));
    }
    tensors_[name] = std::move(tensor);
  }
}

/// Throws Error where the plans lack an input or output, or have another size than the profile says.
void TrtDevice::require_tensors() const {
  const std::int64_t rows = profile.batch * profile.beams;
  const auto refuse = [this](const std::string& what) {
    throw Error(Status::bundle, "the plans for " + profile.shown() + " have no " + what + ": export and build again");
  };
  const auto require = [&](const std::string& name, std::int64_t values, DataType type) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end()) refuse(name);
    const Tensor& tensor = found->second;
    const auto bytes = static_cast<std::size_t>(values) * 4;
    if (tensor.type != static_cast<std::int32_t>(type) || tensor.bytes != bytes) refuse(name + " of that size");
  };
  require("src_ids", profile.batch * profile.src_len, DataType::kINT32);
  require("src_lengths", profile.batch, DataType::kINT32);
  require("end_id", 1, DataType::kINT32);
  require("live_beams", 1, DataType::kINT32);
  for (const char* before : {"", "next_"}) {
    for (const std::string& name : fed_) {
      require(before + name, rows, name == "values" ? DataType::kFLOAT : DataType::kINT32);
    }
  }
  const auto ids = tensors_.find("top_ids");
  if (ids == tensors_.end() || ids->second.shape.empty()) refuse("top_ids");
  const std::int64_t best = ids->second.shape.back();
  require("top_ids", rows * best, DataType::kINT32);
  require("top_scores", rows * best, DataType::kFLOAT);
  if (!tensors_.count("log_probs")) refuse("log_probs");
  for (const std::string& name : cross_names_) {
    if (!tensors_.count(name)) refuse(name);
  }
}

/// Assign consecutive aligned offsets; returns the size of the block.
std::size_t TrtDevice::lay_out(const std::vector<std::string>& names) {
  std::size_t end = 0;
  for (const std::string& name : names) {
    Tensor& tensor = tensors_[name];
    tensor.offset = end;
    end += (tensor.bytes + alignment - 1) / alignment * alignment;
  }
  return end;
}

void TrtDevice::take_memory() {
  std::vector<std::string> turn = fed_;
  fed_size_ = lay_out(fed_);
  turn.insert(turn.end(), found_names.begin(), found_names.end());
  turn_size_ = lay_out(turn);
  given_size_ = lay_out(given_names);
  for (const auto& [name, tensor] : tensors_) {
    if (begins(name, "past_")) pasts_of_.push_back(name);
    if (begins(name, "cross_") || begins(name, "log_")) memory_[name] = std::make_unique<Memory>(tensor.bytes);
  }
  past_size_ = lay_out(pasts_of_);
  given_ = std::make_unique<Memory>(given_size_);
  requests_ = std::make_unique<Pinned>(given_size_);
  choices_ = std::make_unique<Pinned>(fed_size_);
  for (int turn_of : {0, 1}) {
    turns_[turn_of] = std::make_unique<Memory>(turn_size_);
    pasts_[turn_of] = std::make_unique<Memory>(past_size_);
    slots_[turn_of] = std::make_unique<Pinned>(turn_size_);
    stream_.clear(*turns_[turn_of]);
    stream_.clear(*pasts_[turn_of]);
  }
  for (const auto& [name, memory] : memory_) stream_.clear(*memory);
  stream_.clear(*given_);
}

/// Addresses of the inputs and outputs of steps that read the buffers `now` and write the others.
TrtDevice::Addresses TrtDevice::addresses(int now) const {
  Addresses places;
  for (const auto& [name, memory] : memory_) places[name] = memory->address;
  for (const std::string& name : given_names) places[name] = given_->address + tensors_.at(name).offset;
  for (const std::string& name : found_names) places[name] = turns_[1 - now]->address + tensors_.at(name).offset;
  for (const std::string& name : fed_) {
    places[name] = turns_[now]->address + tensors_.at(name).offset;
    places["next_" + name] = turns_[1 - now]->address + tensors_.at(name).offset;
  }
  for (const std::string& name : pasts_of_) {
    places[name] = pasts_[now]->address + tensors_.at(name).offset;
    places["present" + name.substr(4)] = pasts_[1 - now]->address + tensors_.at(name).offset;
  }
  return places;
}

/// Record a plan as a CUDA graph, after a run that loads its kernels; if capture fails it is enqueued each time.
void TrtDevice::prepare(nvinfer1::ICudaEngine& plan, const Addresses& places, Launch& launch) {
#if NV_TENSORRT_MAJOR >= 11  // TensorRT for RTX cannot be captured while it allocates its own workspace
  const bool given = runtime_.for_rtx();
  using Strategy = nvinfer1::ExecutionContextAllocationStrategy;
  launch.context.reset(plan.createExecutionContext(given ? Strategy::kUSER_MANAGED : Strategy::kSTATIC));
  if (const std::int64_t size = given && launch.context ? plan.getDeviceMemorySizeV2() : 0) {
    launch.scratch = std::make_unique<Memory>(static_cast<std::size_t>(size));
    launch.context->setDeviceMemoryV2(reinterpret_cast<void*>(launch.scratch->address), size);
  }
#else
  launch.context.reset(plan.createExecutionContext());
#endif
  if (!launch.context) {
    const std::string said = runtime_.reasons();
    if (is_full(said)) {
      throw Error(Status::no_memory,
                  runtime_.title() + " has no room for " + profile.shown() + ": " + said + ": build a smaller profile");
    }
    throw Error(Status::engine,
                runtime_.title() + " cannot run the plans for " + profile.shown() + " on this GPU: " + said);
  }
  for (std::int32_t i = 0; i < plan.getNbIOTensors(); ++i) {
    const char* name = plan.getIOTensorName(i);
    const auto place = places.find(name);
    if (place == places.end() || !launch.context->setTensorAddress(name, reinterpret_cast<void*>(place->second))) {
      throw Error(Status::engine, runtime_.title() + " does not take " + name + ": " + runtime_.reasons());
    }
  }
  run(launch);
  stream_.wait();
  try {
    auto graph = std::make_unique<Graph>(stream_, [&] { run(launch); });
    graph->launch();  // uploads it to the device
    stream_.wait();
    launch.graph = std::move(graph);
  } catch (const Error& error) {
    not_captured_ = error.what();
  }
}

void TrtDevice::run(Launch& launch) {
  if (launch.graph) {
    launch.graph->launch();
  } else if (!launch.context->enqueueV3(stream_.handle)) {
    throw Error(Status::engine, runtime_.title() + " stopped: " + runtime_.reasons());
  }
}

template <typename Value>
Value* TrtDevice::view(const Pinned& block, const std::string& name) const {
  return reinterpret_cast<Value*>(block.bytes + tensors_.at(name).offset);
}

void TrtDevice::encode(const std::vector<std::int32_t>& src_ids, const std::vector<std::int32_t>& src_lengths,
                       const Outlook& outlook) {
  const OnGpu on;
  stream_.wait();  // an earlier copy from this host memory may still be running
  std::copy(src_ids.begin(), src_ids.end(), view<std::int32_t>(*requests_, "src_ids"));
  std::copy(src_lengths.begin(), src_lengths.end(), view<std::int32_t>(*requests_, "src_lengths"));
  *view<std::int32_t>(*requests_, "end_id") = outlook.end_id;
  *view<std::int32_t>(*requests_, "live_beams") =
      static_cast<std::int32_t>(outlook.beams ? outlook.beams : profile.beams);
  stream_.to_device(given_->address, *requests_, given_size_);
  run(launches_[encoder]);
}

void TrtDevice::feed(const NextInputs& choice, std::int64_t step) {
  const OnGpu on;
  if (step) stream_.wait();  // an earlier copy from this host memory may still be running; not before step 0
  std::copy(choice.tokens.begin(), choice.tokens.end(), view<std::int32_t>(*choices_, fed_[0]));
  std::copy(choice.parents.begin(), choice.parents.end(), view<std::int32_t>(*choices_, fed_[1]));
  std::copy(choice.values.begin(), choice.values.end(), view<float>(*choices_, fed_[2]));
  std::copy(choice.positions.begin(), choice.positions.end(), view<std::int32_t>(*choices_, fed_[3]));
  stream_.to_device(turns_[step % 2]->address, *choices_, fed_size_);
}

void TrtDevice::issue(std::int64_t step) {
  const OnGpu on;
  run(launches_[step % 2]);
  stream_.to_host(*slots_[step % 2], turns_[1 - step % 2]->address, turn_size_);
  ends_[step % 2].record(stream_);
}

void TrtDevice::read(std::int64_t step, Record& record) {
  const OnGpu on;
  ends_[step % 2].wait();
  const Pinned& slot = *slots_[step % 2];
  const auto copy = [&](const std::string& name, auto& into) {
    using Value = typename std::decay_t<decltype(into)>::value_type;
    const Value* from = view<Value>(slot, name);
    into.assign(from, from + tensors_.at(name).bytes / sizeof(Value));
  };
  copy("top_ids", record.ids);
  copy("top_scores", record.scores);
  copy(fed_[0], record.next.tokens);
  copy(fed_[1], record.next.parents);
  copy(fed_[2], record.next.values);
}

/// Copy a device tensor to the host, as fp32.
std::vector<float> TrtDevice::fetch(const std::string& name) {
  const OnGpu on;
  const Tensor& tensor = tensors_.at(name);
  std::unique_ptr<Pinned>& block = fetched_[name];
  if (!block) block = std::make_unique<Pinned>(tensor.bytes);
  stream_.to_host(*block, memory_.at(name)->address, tensor.bytes);
  stream_.wait();
  std::vector<float> found(tensor.bytes / bytes_of(tensor.type, name));
  if (tensor.type == static_cast<std::int32_t>(DataType::kFLOAT)) {
    std::memcpy(found.data(), block->bytes, tensor.bytes);
    return found;
  }
  const auto* halves = reinterpret_cast<const std::uint16_t*>(block->bytes);
  for (std::size_t i = 0; i < found.size(); ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(halves[i]) << 16U;
    if (tensor.type == bf16) std::memcpy(&found[i], &bits, sizeof bits);
    else found[i] = half_as_float(halves[i]);
  }
  return found;
}

const std::vector<float>& TrtDevice::log_probs() { return log_probs_ = fetch("log_probs"); }

std::vector<std::vector<float>> TrtDevice::cross() {
  std::vector<std::vector<float>> found;
  for (const std::string& name : cross_names_) found.push_back(fetch(name));
  return found;
}

namespace {

/// H, M and D of keys or values (rows, H, M, D); of states (rows, D) of recurrent cells one head and one position.
std::array<std::int64_t, 3> kept_sizes(const std::vector<std::int64_t>& shape) {
  if (shape.size() == 2) return {1, 1, shape[1]};
  return shape.size() == 4 ? std::array{shape[1], shape[2], shape[3]} : std::array<std::int64_t, 3>{};
}

}  // namespace

void TrtDevice::take_over(TrtDevice& other, const std::vector<std::int32_t>& theirs,
                          const std::vector<std::int32_t>& ours, std::int64_t filled, std::int64_t step) {
  const OnGpu on;
  Pinned source(other.past_size_), target(past_size_);
  other.stream_.to_host(source, other.pasts_[step % 2]->address, other.past_size_);
  other.stream_.wait();
  for (const std::string& name : pasts_of_) {
    const Tensor &to = tensors_.at(name), &from = other.tensors_.at(name);
    const auto [heads, room, width] = kept_sizes(to.shape);
    const auto [their_heads, their_room, their_width] = kept_sizes(from.shape);
    if (to.type != from.type || !heads || heads != their_heads || width != their_width) {
      throw Error(Status::bundle, "the plans for " + profile.shown() + " and " + other.profile.shown() + " differ in " +
                                      name + ": export and build again");
    }
    const std::size_t parts = size(heads), each = size(width) * bytes_of(to.type, name);
    const std::size_t bytes = size(std::min({filled, room, their_room})) * each;
    for (std::size_t i = 0; i < ours.size() * parts; ++i) {
      const std::size_t row = size(ours[i / parts]), other_row = size(theirs[i / parts]), part = i % parts;
      std::memcpy(target.bytes + to.offset + (row * parts + part) * size(room) * each,
                  source.bytes + from.offset + (other_row * parts + part) * size(their_room) * each, bytes);
    }
  }
  stream_.to_device(pasts_[step % 2]->address, target, past_size_);
  stream_.wait();
}

}  // namespace tformer
