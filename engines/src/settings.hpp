// Options by their names, as the C API and the command line have them.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "ort/graphs.hpp"

namespace tformer {

/// The most threads or workers: several for each core, so that waiting ones cost nothing.
std::int64_t most_parallel();

struct Settings {
  OpenOptions open;
  std::int64_t batch_tokens = 0;              ///< padded source tokens of a batch, per beam; 0: what suits the backend
  std::int64_t workers = 1;                   ///< batches that are decoded at a time
  std::int64_t max_line_bytes = 1 << 20;      ///< longer lines are refused
  Json decoding = Json::object();             ///< decoding options that are asked for
  std::string others;                         ///< the last option that was set and is none of decoding; empty: none was

  /// Throws Error for a name or value that does not exist.
  void set(const std::string& name, const std::string& value);
};

}  // namespace tformer
