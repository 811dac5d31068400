#include "native/fields.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

namespace tformer::native {

const Json& list_of(const Json& from, const char* key) {
  if (!from.is_object() || !from.contains(key) || !from[key].is_array()) {
    throw std::invalid_argument(std::string("it has no list '") + key + "'");
  }
  return from[key];
}

std::int64_t whole(const Json& value, std::int64_t least, std::int64_t most, const std::string& what) {
  if (!value.is_number_integer() || value < least || value > most) {
    throw std::invalid_argument(what + " is " + value.dump().substr(0, 40) + ", not a whole number from " +
                                std::to_string(least) + " to " + std::to_string(most));
  }
  return value.get<std::int64_t>();
}

const Json& member_of(const Json& from, const char* key) {
  if (!from.is_object() || !from.contains(key)) throw std::invalid_argument(std::string("it has no '") + key + "'");
  return from[key];
}

std::int64_t whole(const Json& from, const char* key, std::int64_t least, std::int64_t most) {
  return whole(member_of(from, key), least, most, key);
}

float real(const Json& from, const char* key) {
  const Json& value = member_of(from, key);
  const double number = value.is_number() ? value.get<double>() : std::numeric_limits<double>::quiet_NaN();
  if (!std::isfinite(number) || std::abs(number) > static_cast<double>(std::numeric_limits<float>::max())) {
    throw std::invalid_argument(std::string(key) + " is no number");
  }
  return static_cast<float>(number);
}

float positive(const Json& from, const char* key) {
  const float number = real(from, key);
  if (!(number > 0)) throw std::invalid_argument(std::string(key) + " is not above 0");
  return number;
}

Arrays::Array Arrays::array(const Json& from, const char* key) const {
  const std::int64_t most = static_cast<std::int64_t>(arrays_.size()) - 1;
  const Json& about = arrays_[static_cast<std::size_t>(whole(from, key, 0, most))];
  Array found{nullptr, member_of(about, "dtype").is_string() ? about["dtype"].get<std::string>() : "", {}};
  const std::map<std::string, std::int64_t> sizes = {{"float32", 4}, {"int32", 4}, {"int8", 1}, {"uint8", 1}, {"uint16", 2}};
  if (!sizes.count(found.dtype)) throw std::invalid_argument(std::string(key) + " has an unknown dtype");
  const auto room = static_cast<std::int64_t>(weights_.size());
  std::int64_t bytes = sizes.at(found.dtype);
  for (const Json& size : list_of(about, "shape")) {
    found.shape.push_back(whole(size, 1, std::max<std::int64_t>(1, room / bytes), std::string(key) + "'s size"));
    bytes *= found.shape.back();
  }
  const std::int64_t offset = whole(about, "offset", 0, room - bytes);
  if (offset % 64) throw std::invalid_argument(std::string(key) + " is not at a multiple of 64");
  found.data = weights_.data() + offset;
  return found;
}

}  // namespace tformer::native
