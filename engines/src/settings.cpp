#include "settings.hpp"

#include <algorithm>
#include <charconv>
#include <functional>
#include <map>

#include "bundle/files.hpp"
#include "cores.hpp"
#include "decode/options.hpp"
#include "errors.hpp"

namespace tformer {
namespace {

std::int64_t whole(const std::string& name, const std::string& value, std::int64_t least, std::int64_t most) {
  std::int64_t number = 0;
  const auto [end, problem] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (problem != std::errc() || end != value.data() + value.size() || number < least || number > most) {
    throw Error(Status::usage, name + "=" + value.substr(0, 60) + ": must be a whole number from " +
                                   std::to_string(least) + " to " + std::to_string(most));
  }
  return number;
}

bool truth(const std::string& name, const std::string& value) {
  if (value != "true" && value != "false") {
    throw Error(Status::usage, name + "=" + value.substr(0, 60) + ": must be true or false");
  }
  return value == "true";
}

}  // namespace

std::int64_t most_parallel() { return std::max(64, 4 * cores()); }

void Settings::set(const std::string& name, const std::string& value) {
  const std::map<std::string, std::function<void()>> own = {
      {"backend", [&] { open.backend = value; }},
      {"variant", [&] { open.variant = value; }},
      {"threads", [&] { open.threads = static_cast<int>(whole(name, value, 0, most_parallel())); }},
      {"kernels", [&] { open.kernels = value; }},
      {"shortlist", [&] { open.shortlist = truth(name, value); }},
      {"verify", [&] { open.verify = truth(name, value); }},
      {"onnxruntime", [&] { open.onnxruntime = value; }},
      {"tensorrt", [&] { open.tensorrt = value; }},
      {"batch_tokens", [&] { batch_tokens = whole(name, value, 0, 1 << 24); }},
      {"workers", [&] { workers = whole(name, value, 1, most_parallel()); }},
      {"max_line_bytes", [&] { max_line_bytes = whole(name, value, 1, 1 << 30); }},
  };
  if (const auto found = own.find(name); found != own.end()) {
    found->second();
    last_model_option = name;
    return;
  }
  std::vector<std::string> valid = option_names();
  if (std::find(valid.begin(), valid.end(), name) == valid.end()) {
    for (const auto& [each, unused] : own) valid.push_back(each);
    throw Error(Status::usage, unknown("option", name, valid));
  }
  decoding[name] = option_value(name, value);
}

}  // namespace tformer
