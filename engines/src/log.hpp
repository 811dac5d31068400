// Messages about what the library decides by itself, for a callback of the application. Without one they cost nothing.
#pragma once

#include <functional>
#include <string>

namespace tformer {

/// The numbers are those of `tformer_level` in tformer.h, and of Python's module logging.
enum class Level : int { debug = 10, info = 20, warning = 30 };

/// Gets each message, one line of UTF-8. It must not throw. May be called by several threads at a time.
using Log = std::function<void(Level level, const std::string& message)>;

/// Set the callback of the process, or none. A call in another thread may still be in the one before, which is freed
/// when it has ended.
void set_log(Log log);

/// Whether there is a callback.
bool logs();

/// Hand a message to the callback. Not while a lock is held, as the callback may call the library.
void write_log(Level level, const std::string& message);

/// The same for what `message` returns, which is called only if there is a callback.
template <typename Message>
void log(Level level, const Message& message) {
  if (logs()) write_log(level, message());
}

}  // namespace tformer
