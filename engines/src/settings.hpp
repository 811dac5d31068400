// Options set by name and text, as the C API and the command line give them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "backend.hpp"

namespace tformer {

/// The most threads or workers that may be set: 4 per core, at least 64.
std::int64_t most_parallel();

struct Settings {
  OpenOptions open;
  std::int64_t batch_tokens = 0;              ///< padded source tokens per batch and beam; 0: the backend's own
  std::int64_t workers = 1;                   ///< batches decoded at a time
  std::int64_t max_line_bytes = 1 << 20;      ///< longer lines are refused
  Json decoding = Json::object();             ///< decoding options that were set
  std::string last_model_option;              ///< the last option set that is not of decoding; empty: none

  /// Throws Error for a name or value that does not exist.
  void set(const std::string& name, const std::string& value);
};

}  // namespace tformer
