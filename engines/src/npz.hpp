// Arrays of numpy's .npz, as early bundles have them: a zip archive of .npy files that are not compressed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tformer {

/// One array of at most one dimension.
struct NpyArray {
  std::string type;   ///< such as <i8
  std::string bytes;  ///< little-endian
  /// The values of an array of whole numbers of 4 or 8 bytes. Throws std::invalid_argument for another.
  std::vector<std::int64_t> whole_numbers() const;
  /// The values of an array of ASCII texts. Throws std::invalid_argument for another.
  std::vector<std::string> texts() const;
};

/// The arrays of an archive by their names. Throws std::invalid_argument for one that is not as numpy writes it.
std::map<std::string, NpyArray> read_npz(std::string_view content);

}  // namespace tformer
