#include "native/values.hpp"

#include <algorithm>
#include <cstring>

namespace tformer::native {
namespace {

// Bytes of a row are a multiple of `line`, but not of this: a core's cache holds few lines at such distances.
constexpr std::size_t apart = 512;
constexpr std::size_t tiles = 32;  // rows are a multiple of it: kernels may read, but not use, what is behind the last

std::size_t up(std::size_t number, std::size_t to) { return (number + to - 1) / to * to; }

/// The values that an instruction reads.
std::vector<std::int32_t> read_by(const Instruction& each) {
  std::vector<std::int32_t> found;
  for (const View* view : {&each.x, &each.y, &each.gate, &each.residual, &each.q, &each.k, &each.v}) {
    if (*view) found.push_back(view->value);
  }
  return found;
}

}  // namespace

Values::Values(const Code& code) : strides_(code.widths.size()), slots_(code.widths.size(), 0) {
  std::vector<std::size_t> last(code.widths.size(), 0), free;
  for (std::size_t i = 0; i < code.instructions.size(); ++i) {
    for (const std::int32_t value : read_by(code.instructions[i])) last[static_cast<std::size_t>(value)] = i;
  }
  for (std::size_t i = 0; i < code.instructions.size(); ++i) {
    const Instruction& each = code.instructions[i];
    for (const std::int32_t written : {each.out, each.rounded}) {
      if (written < 0) continue;
      const auto value = static_cast<std::size_t>(written);
      const std::size_t element = code.bytes[value] ? 1 : sizeof(float);
      std::size_t bytes = up(static_cast<std::size_t>(code.widths[value]) * element, line);
      if (bytes % apart == 0) bytes += line;
      strides_[value] = bytes / element;
      const auto room = std::find_if(free.begin(), free.end(), [&](std::size_t slot) { return sizes_[slot] == bytes; });
      if (room == free.end()) {
        slots_[value] = sizes_.size();
        sizes_.push_back(bytes);
      } else {
        slots_[value] = *room;
        free.erase(room);
      }
    }
    // After what is written has its place, as an instruction may write a row before it has read the next.
    std::vector<std::int32_t> ended = read_by(each);
    std::sort(ended.begin(), ended.end());
    ended.erase(std::unique(ended.begin(), ended.end()), ended.end());
    for (const std::int32_t value : ended) {
      if (last[static_cast<std::size_t>(value)] == i) free.push_back(slots_[static_cast<std::size_t>(value)]);
    }
  }
}

void Values::resize(std::size_t rows, Memory& memory) {
  if (rows <= rows_) return;
  rows_ = 0;  // so that the next call makes room if there is no memory for this one
  places_.clear();
  block_ = Block();
  const std::size_t more = up(rows, tiles);
  std::size_t bytes = 0;
  for (const std::size_t each : sizes_) bytes += each * more;
  block_ = memory.take(bytes / sizeof(float));
  std::memset(block_.data(), 0, bytes);  // denormals in rows that nobody wrote would slow the kernels
  std::byte* place = reinterpret_cast<std::byte*>(block_.data());
  for (const std::size_t each : sizes_) {
    places_.push_back(place);
    place += each * more;
  }
  rows_ = more;
}

}  // namespace tformer::native
