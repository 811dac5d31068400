#include "ort/library.hpp"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <mutex>
#include <sstream>

#include "errors.hpp"
#include "log.hpp"
#include "system.hpp"

namespace fs = std::filesystem;

namespace tformer {
namespace {

using GetApiBase = const OrtApiBase*(ORT_API_CALL*)();
// Older versions write past the caches of in-place steps, and before 1.24.1 a graph could read any file.
constexpr std::array<int, 3> oldest = {1, 31, 0};
constexpr std::size_t longest_reason = 300;  // characters

std::mutex load_lock;
std::string loaded_from, loaded_version;
Ort::Env* environment = nullptr;

Error missing(const std::string& what) { return Error(Status::missing, what); }

/// The file in a folder, such as the one of the Python package.
std::string library_in(const fs::path& folder) {
  std::string found;
  std::error_code problem;
  for (fs::directory_iterator it(folder, problem), end; !problem && it != end; it.increment(problem)) {
    const std::string name = it->path().filename().string();
    if (name.rfind("libonnxruntime.so", 0) == 0) found = std::max(found, it->path().string());
  }
  if (problem) throw missing(folder.string() + " cannot be read: " + problem.message() + ": name the file");
  if (found.empty()) throw missing(folder.string() + " has no libonnxruntime.so: name the file");
  return found;
}

/// What to load: `place`, the environment's, or names that the loader looks for.
std::vector<std::string> candidates(const std::string& place) {
  const char* named = std::getenv("TFORMER_ONNXRUNTIME");
  const std::string wanted = place.empty() && named ? named : place;
  if (wanted.empty()) return {"libonnxruntime.so.1", "libonnxruntime.so"};
  std::error_code ignored;  // if it cannot be read, the loader says why
  return {fs::is_directory(wanted, ignored) ? library_in(wanted) : wanted};
}

void* open_library(const std::vector<std::string>& names) {
  std::string said;
  for (const std::string& name : names) {
    std::string why;
    if (void* library = system::open_library(name, why)) {
      loaded_from = name;
      return library;
    }
    if (said.empty()) said = why;
  }
  throw missing("ONNX Runtime cannot be loaded (" + said +
                "): pip install onnxruntime, and name its libonnxruntime.so.VERSION in TFORMER_ONNXRUNTIME");
}

/// Refuse a version that is too old before anything else of it is called.
void check_version(const std::string& version) {
  std::array<int, 3> numbers{};
  std::sscanf(version.c_str(), "%d.%d.%d", &numbers[0], &numbers[1], &numbers[2]);
  if (numbers < oldest) {
    throw missing("onnxruntime " + version + " writes past the caches of a decoding step: update it to 1.31.0 or later");
  }
  if (numbers[0] != 1 || numbers[1] < ORT_API_VERSION) {
    throw missing("onnxruntime " + version + " has not the API 1." + std::to_string(ORT_API_VERSION) +
                  " that this library was built for: use 1." + std::to_string(ORT_API_VERSION) + " or a later 1.x");
  }
}

/// Drop "Load model from FILE failed:" and source locations such as "/a/b.cc:12 void f(int) const".
std::string without_places(const std::string& said) {
  std::string text = said.substr(0, 10 * longest_reason);
  const std::string_view failed = " failed:";
  if (const std::size_t at = text.find(failed); text.rfind("Load model from ", 0) == 0 && at != std::string::npos) {
    text.erase(0, at + failed.size());
  }
  std::istringstream words(text);
  std::string word, kept;
  int skipping = 0;  // inside a function's signature
  while (words >> word) {
    if (skipping) {
      skipping = word.find(')') == std::string::npos ? skipping - 1 : 0;
      continue;
    }
    if (word.find(".cc:") != std::string::npos || word.find(".h:") != std::string::npos) {
      skipping = 12;
      continue;
    }
    kept += (kept.empty() ? "" : " ") + word;
  }
  return kept;
}

}  // namespace

namespace {

/// Returns whether it was not loaded before.
bool loaded_now(const std::string& place) {
  const std::lock_guard<std::mutex> held(load_lock);
  if (environment) {
    if (!place.empty() && candidates(place).front() != loaded_from) {
      throw Error(Status::usage, "ONNX Runtime is loaded from " + loaded_from + " already: name one for the process");
    }
    return false;
  }
  system::set_default("ORT_DISABLE_TELEMETRY", "1");  // before the library loads: it would report usage to its vendor
  void* library = open_library(candidates(place));
  const auto get = reinterpret_cast<GetApiBase>(system::symbol(library, "OrtGetApiBase"));
  if (!get) throw missing(loaded_from + " is not ONNX Runtime: it has no OrtGetApiBase");
  const OrtApiBase* base = get();
  loaded_version = base->GetVersionString();
  check_version(loaded_version);
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (!api) throw missing("onnxruntime " + loaded_version + " refuses the API 1." + std::to_string(ORT_API_VERSION));
  Ort::InitApi(api);
  environment = new Ort::Env(ORT_LOGGING_LEVEL_FATAL, "tformer");  // never freed: its threads may outlive our statics
  return true;
}

}  // namespace

void load_onnxruntime(const std::string& place) {
  if (!loaded_now(place)) return;
  log(Level::info, [] {
    return "loaded onnxruntime " + loaded_version + " from " + loaded_from +
           (has_vnni() ? "" : "; the processor has no VNNI, so 8-bit weights are made unsigned");
  });
}

const std::string& onnxruntime_version() { return loaded_version; }

Ort::Env& ort_env() { return *environment; }

std::string reason(const std::string& said) {
  std::string line = without_places(said);
  for (char& letter : line) {
    if (static_cast<unsigned char>(letter) < 0x20 || letter == 0x7f) letter = '?';
  }
  while (!line.empty() && line.back() == '.') line.pop_back();
  if (line.size() <= longest_reason) return line;
  std::size_t end = longest_reason - 3;
  while (end && (static_cast<unsigned char>(line[end]) & 0xC0) == 0x80) --end;  // not inside a UTF-8 character
  return line.substr(0, end) + "...";
}

bool has_vnni() {
  static const bool found = [] {
    std::ifstream info("/proc/cpuinfo");
    for (std::string line; std::getline(info, line);) {
      if (line.rfind("flags", 0) == 0) return line.find("_vnni") != std::string::npos;
    }
    return false;
  }();
  return found;
}

}  // namespace tformer
