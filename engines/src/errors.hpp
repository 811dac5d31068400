// The library's exceptions. A message is one line that says what is wrong, where, and how to fix it.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tformer {

/// What kind of error it is; the numbers are those of `tformer_status` in tformer.h.
enum class Status : int {
  ok = 0,
  usage = 1,        ///< ConfigError: an option, name or argument that does not exist or does not fit the others
  bundle = 2,       ///< ArtifactError: a bundle that is missing, damaged, edited or of a newer format
  limit = 3,        ///< LimitError: a request beyond what the model or the recipe allows
  text = 4,         ///< DataError: text that cannot be used
  engine = 5,       ///< EngineError: a runtime that stopped with an error of its own
  not_numbers = 6,  ///< NotNumbers: NaN or infinite log-probabilities
  missing = 7,      ///< a library, driver or GPU is missing or too old, or text is split by rules that C++ lacks
  cancelled = 8,    ///< the caller's callback asked to stop
  no_memory = 9,    ///< there is no memory left
  internal = 10,    ///< a fault of the library itself
};

/// What went wrong, where, and how to fix it.
struct Error : std::runtime_error {
  Error(Status why, const std::string& message) : std::runtime_error(message), status(why) {}
  Status status;
};

/// NaN or infinite log-probabilities in one `request`, counted from 0.
struct NotNumbers : Error {
  explicit NotNumbers(const std::string& why, std::uint64_t number = 0)
      : Error(Status::not_numbers, "request " + std::to_string(number + 1) + ": " + why), reason(why), request(number) {}
  std::string reason;  ///< the message without the request's number
  std::uint64_t request;
};

}  // namespace tformer
