// Sources: PKWARE's APPNOTE.TXT 4.3 (zip), numpy.lib.format (npy).
#include "npz.hpp"

#include <charconv>
#include <cstring>
#include <stdexcept>

namespace tformer {
namespace {

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(why); }

template <typename Number>
Number number_at(std::string_view content, std::size_t place) {
  if (place > content.size() || content.size() - place < sizeof(Number)) refuse("it ends too soon");
  Number value;
  std::memcpy(&value, content.data() + place, sizeof value);
  return value;
}

std::size_t short_at(std::string_view content, std::size_t place) { return number_at<std::uint16_t>(content, place); }

std::string_view part(std::string_view content, std::size_t place, std::size_t size) {
  if (place > content.size() || content.size() - place < size) refuse("it ends too soon");
  return content.substr(place, size);
}

/// The value of a key in the header of an .npy file, such as {'descr': '<i8', 'shape': (3,), }.
std::string_view value_of(std::string_view header, std::string_view key, char first, char last) {
  const std::size_t at = header.find(key);
  const std::size_t begin = at == std::string_view::npos ? at : header.find(first, at + key.size());
  const std::size_t end = begin == std::string_view::npos ? begin : header.find(last, begin + 1);
  if (end == std::string_view::npos) refuse("an array has no header");
  return header.substr(begin + 1, end - begin - 1);
}

NpyArray read_npy(std::string_view file) {
  if (part(file, 0, 6) != "\x93NUMPY" || number_at<std::uint8_t>(file, 6) != 1) refuse("an array is not of numpy");
  const std::size_t size = number_at<std::uint16_t>(file, 8);
  const std::string_view header = part(file, 10, size);
  if (value_of(header, "'shape'", '(', ')').find(", ") != std::string_view::npos) refuse("an array has two dimensions");
  return {std::string(value_of(header, "'descr':", '\'', '\'')), std::string(file.substr(10 + size))};
}

}  // namespace

std::vector<std::int64_t> NpyArray::whole_numbers() const {
  const std::size_t width = type == "<i8" ? 8 : type == "<i4" ? 4 : 0;
  if (!width || bytes.size() % width) refuse("its lists are not lists of whole numbers");
  std::vector<std::int64_t> values;
  for (std::size_t at = 0; at < bytes.size(); at += width) {
    values.push_back(width == 8 ? number_at<std::int64_t>(bytes, at) : number_at<std::int32_t>(bytes, at));
  }
  return values;
}

std::vector<std::string> NpyArray::texts() const {
  std::size_t letters = 0;
  if (type.rfind("<U", 0) == 0) std::from_chars(type.data() + 2, type.data() + type.size(), letters);
  if (!letters || letters > 1024 || bytes.size() % (4 * letters)) refuse("its hashes are no texts");
  std::vector<std::string> values;
  for (std::size_t at = 0; at < bytes.size(); at += 4 * letters) {
    std::string& text = values.emplace_back();
    for (std::size_t i = 0; i < letters; ++i) {
      const auto letter = number_at<std::uint32_t>(bytes, at + 4 * i);
      if (letter > 0x7f) refuse("its hashes are no texts");
      if (letter) text += static_cast<char>(letter);
    }
  }
  return values;
}

std::map<std::string, NpyArray> read_npz(std::string_view content) {
  constexpr std::size_t end_size = 22, entry_size = 46, local_size = 30;
  if (content.size() < end_size) refuse("it is no archive");
  const std::size_t end = content.size() - end_size;  // numpy writes no comment behind it
  if (part(content, end, 4) != "PK\x05\x06") refuse("it is no archive");
  std::size_t at = number_at<std::uint32_t>(content, end + 16);
  std::map<std::string, NpyArray> arrays;
  for (std::size_t i = number_at<std::uint16_t>(content, end + 10); i > 0; --i) {
    if (part(content, at, 4) != "PK\x01\x02") refuse("its directory is damaged");
    if (number_at<std::uint16_t>(content, at + 10) != 0) refuse("it is compressed");
    const std::size_t size = number_at<std::uint32_t>(content, at + 24);
    const std::size_t place = number_at<std::uint32_t>(content, at + 42), name_size = short_at(content, at + 28);
    const std::string_view name = part(content, at + entry_size, name_size);
    const std::size_t skipped = local_size + short_at(content, place + 26) + short_at(content, place + 28);
    arrays[std::string(name.substr(0, name.rfind(".npy")))] = read_npy(part(content, place + skipped, size));
    at += entry_size + name_size + short_at(content, at + 30) + short_at(content, at + 32);
  }
  return arrays;
}

}  // namespace tformer
