// The flags of `tformer-cpp translate`: those of `tformer translate` but --backend, --device and --checkpoint, and more.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <tformer/tformer.hpp>
#include <vector>

/// A command line that cannot be understood: exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What the command line asks for.
struct CommandLine {
  std::string bundle, backend;
  tformer::Options model, translator;  ///< by their names in tformer.h
  std::vector<std::pair<std::string, std::string>> entries;  ///< an option, and an entry of the vocabulary for it
  std::optional<std::string> prefix_file, allowed_file;
  std::size_t window_tokens = 4096, max_line_bytes = std::size_t{1} << 20;
  long workers = 0;  ///< 0: one a core if there is text for all; on a GPU one
  bool align = false, stream = false, json = false, ids = false, score = false, help = false, version = false;
};

extern const char* const help_text;

/// Throws UsageError.
CommandLine parse_command_line(const std::vector<std::string>& arguments);
