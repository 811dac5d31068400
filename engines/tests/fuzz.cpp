// What others may have written, read from any bytes: fuzz FOLDER SECONDS changes the files of a bundle at random and reads
// them. With clang, -fsanitize=fuzzer and -DTFORMER_LIBFUZZER it is a target of libFuzzer. Run it with sanitizers.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bundle/model.hpp"
#include "bundle/schema.hpp"
#include "decode/options.hpp"
#include "errors.hpp"
#include "npz.hpp"
#include "ort/library.hpp"
#include "settings.hpp"
#include "shortlist.hpp"

using namespace tformer;

namespace {

void read_manifest(const std::string& text) {
  const Json manifest = parse_json(text);
  if (!schema_error(manifest, bundle_schema()).empty()) return;
  model_of(manifest["model"]);
  recipe_of(manifest["recipe"]);
  same_model(manifest["model"], manifest["model"]);
  same_recipe(manifest["recipe"], manifest["recipe"]);
}

void read_lists(const std::string& content) {
  const Shortlist lists(unpacked(content));
  std::vector<std::uint8_t> allowed(lists.parts().vocab);
  std::vector<std::int32_t> source;
  for (std::size_t token = 0; token < lists.parts().sources && token < 1000; ++token) {
    source.push_back(static_cast<std::int32_t>(token));
  }
  lists.allow(source.data(), source.size(), allowed.data());
}

void read_arrays(const std::string& content) {
  for (const auto& [name, array] : read_npz(content)) {
    if (array.type.rfind("<U", 0) == 0) array.texts();
    else array.whole_numbers();
  }
}

void read_options(const std::string& text) {
  Settings settings;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size()), equals = std::min(text.find('=', at), end);
    settings.set(text.substr(at, equals - at), equals < end ? text.substr(equals + 1, end - equals - 1) : "");
    at = end + 1;
  }
  over_defaults(Json::object(), settings.decoding);
}

/// Every reader reads everything; only errors of ours may come.
void read_all(const std::string& content) {
  const auto graph = [](const std::string& bytes) { require_no_control_flow(bytes, "graph.onnx"); };
  for (const auto& reader : std::vector<std::function<void(const std::string&)>>{read_manifest, read_lists, read_arrays,
                                                                                 read_options, graph}) {
    try {
      reader(content);
    } catch (const Error&) {
    } catch (const std::invalid_argument&) {
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  read_all(std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}

#ifndef TFORMER_LIBFUZZER
namespace {

std::string changed(std::string content, std::mt19937_64& random) {
  static const std::vector<std::string> pieces = {"-1", "99999999999999999999", "\"\"", "[[[[", "null", "{}", "\\ud800",
                                                  std::string(8, '\xff'), std::string(4, '\0'), "../", "1e400"};
  for (std::uint64_t times = 1 + random() % 4; times > 0; --times) {
    const std::size_t at = content.empty() ? 0 : random() % content.size();
    switch (random() % 5) {
      case 0: if (!content.empty()) content[at] = static_cast<char>(random()); break;
      case 1: if (!content.empty()) content[at] = static_cast<char>(content[at] ^ (1 << random() % 8)); break;
      case 2: content.insert(at, pieces[random() % pieces.size()]); break;
      case 3: content.erase(at, random() % 40); break;
      default: content.resize(at); break;
    }
  }
  return content;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::cerr << "usage: fuzz FOLDER SECONDS\n";
    return 2;
  }
  std::vector<std::string> seeds = {"beams=4\nlength_penalty=0.6\nsuppress=4,5\nsampling=true\nthreads=2\n"};
  for (const auto& entry : std::filesystem::recursive_directory_iterator(arguments[1])) {
    if (!entry.is_regular_file() || entry.file_size() > 1 << 18) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::mt19937_64 random(1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::stol(arguments[2]));
  long runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) read_all(changed(seeds[random() % seeds.size()], random));
  std::cout << runs << " changed files of " << seeds.size() << " were read or refused\n";
}
#endif
