// Reads the operators of an ONNX file without protobuf. Source: the encoding of Protocol Buffers, and onnx.proto.
#include <cstdint>
#include <stdexcept>
#include <string_view>

#include "errors.hpp"
#include "ort/library.hpp"

namespace tformer {
namespace {

/// Read a varint, and advance `data` past it.
std::uint64_t varint(std::string_view& data) {
  std::uint64_t value = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    if (data.empty()) throw std::invalid_argument("it ends within a number");
    const auto byte = static_cast<unsigned char>(data.front());
    data.remove_prefix(1);
    value |= static_cast<std::uint64_t>(byte & 127) << shift;
    if (byte < 128) return value;
  }
  throw std::invalid_argument("a number has too many bytes");
}

/// Calls `each(number, content)` for each field of a message; content is empty for numbers.
template <typename Each>
void fields(std::string_view data, const Each& each) {
  while (!data.empty()) {
    const std::uint64_t key = varint(data), kind = key & 7;
    std::uint64_t size = 0;
    // Protobuf would truncate it.
    if (key >> 32) throw std::invalid_argument("the key of a field has more than 32 bits");
    if (kind == 0) varint(data);
    else if (kind == 1) size = 8;
    else if (kind == 2) size = varint(data);
    else if (kind == 5) size = 4;
    else throw std::invalid_argument("a field of kind " + std::to_string(kind));
    if (size > data.size()) throw std::invalid_argument("it ends within a field");
    const std::string_view content = data.substr(0, static_cast<std::size_t>(size));
    data.remove_prefix(content.size());
    each(key >> 3, content);
  }
}

}  // namespace

void require_no_control_flow(std::string_view content, const std::string& graph) {
  constexpr std::uint64_t graph_field = 7, functions_field = 25, node_field = 1, operator_field = 4;
  const auto refuse = [&graph](std::string_view name) {
    throw Error(Status::bundle, graph + " has " + std::string(name) +
                                    ", which tformer never exports: get another bundle");
  };
  const auto node = [&refuse](std::uint64_t field, std::string_view value) {
    if (field != operator_field) return;
    for (const char* name : {"If", "Loop", "Scan", "SequenceMap"}) {
      if (value == name) refuse(value);
    }
  };
  fields(content, [&](std::uint64_t field, std::string_view value) {
    if (field == functions_field) refuse("functions of its own");
    if (field != graph_field) return;
    fields(value, [&](std::uint64_t inner, std::string_view part) {
      if (inner == node_field) fields(part, node);
    });
  });
}

}  // namespace tformer
