// Numbers and arrays of a program.json, each checked before it is used; what is wrong is std::invalid_argument.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bundle/bundle.hpp"
#include "bundle/content.hpp"

namespace tformer::native {

const Json& member_of(const Json& from, const char* key);
/// A member that is an array.
const Json& list_of(const Json& from, const char* key);
/// A whole number within bounds; `what` names it in the error.
std::int64_t whole(const Json& value, std::int64_t least, std::int64_t most, const std::string& what);
std::int64_t whole(const Json& from, const char* key, std::int64_t least, std::int64_t most);
/// A finite number that fp32 holds.
float real(const Json& from, const char* key);
float positive(const Json& from, const char* key);

/// The value that a string stands for.
template <typename Value>
Value one_of(const Json& from, const char* key, const std::vector<std::pair<std::string, Value>>& valid) {
  const Json& value = member_of(from, key);
  for (const auto& [name, found] : valid) {
    if (value == name) return found;
  }
  throw std::invalid_argument(std::string(key) + " is " + value.dump().substr(0, 40));
}

/// Arrays of a file of weights, as program.json lists them.
class Arrays {
 public:
  struct Array {
    const std::byte* data;
    std::string dtype;
    std::vector<std::int64_t> shape;
  };

  Arrays(const Json& program, const Content& weights) : arrays_(list_of(program, "arrays")), weights_(weights) {}

  /// An array by its number, of which all lies in the file.
  Array array(const Json& from, const char* key) const;

  /// An array of this type and shape; a size of 0 may be any.
  template <typename Value>
  const Value* array(const Json& from, const char* key, const char* dtype, std::vector<std::int64_t> shape) const {
    const Array found = array(from, key);
    bool fits = found.dtype == dtype && found.shape.size() == shape.size();
    for (std::size_t i = 0; fits && i < shape.size(); ++i) fits = !shape[i] || shape[i] == found.shape[i];
    if (!fits) throw std::invalid_argument(std::string(key) + " is of another type or shape");
    return reinterpret_cast<const Value*>(found.data);
  }

  const float* floats(const Json& from, const char* key, const std::vector<std::int64_t>& shape) const {
    return array<float>(from, key, "float32", shape);
  }
  const float* floats_if(const Json& from, const char* key, const std::vector<std::int64_t>& shape) const {
    return from.contains(key) ? floats(from, key, shape) : nullptr;
  }

 private:
  const Json& arrays_;
  const Content& weights_;
};

}  // namespace tformer::native
