// The flags of `tformer-cpp translate`.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <tformer/tformer.hpp>
#include <vector>

/// A wrong command line: exit code 2.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// What the command line asks for.
struct CommandLine {
  std::string bundle, backend;
  tformer::Options model, translator;  ///< by the names of tformer.h
  std::vector<std::pair<std::string, std::string>> entries;  ///< a decoding option, and a vocabulary entry for it
  std::optional<std::string> prefix_file, allowed_file;
  std::size_t window_tokens = 4096, max_line_bytes = std::size_t{1} << 20;
  long workers = 0;  ///< 0: one per core if there is enough text; on a GPU 1
  bool align = false, stream = false, json = false, ids = false, score = false, help = false, version = false;
};

extern const char* const help_text;

/// Throws UsageError.
CommandLine parse_command_line(const std::vector<std::string>& arguments);
