// What others may have written, read from any bytes: fuzz FOLDER SECONDS [SEED] changes the files of bundles at random and
// reads them; the seed that it prints repeats a run. Run it with sanitizers. With clang and fuzzer-no-link among those, it
// is a target of libFuzzer. The environment variable TFORMER_READER names the one reader to use.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bundle/model.hpp"
#include "bundle/schema.hpp"
#include "decode/options.hpp"
#include "errors.hpp"
#include "native/encoder_run.hpp"
#include "native/executor.hpp"
#include "native/step_run.hpp"
#include "ort/library.hpp"
#include "settings.hpp"
#include "shortlist.hpp"
#include "text/regex.hpp"
#include "text/tokenizer.hpp"
#include "text/unicode.hpp"

using namespace tformer;
namespace fs = std::filesystem;

namespace {

constexpr std::size_t most_vocab = 1 << 24;

/// An empty folder of this process.
fs::path folder() {
  static const fs::path made = fs::temp_directory_path() / ("tformer-fuzz-" + std::to_string(::getpid()));
  fs::remove_all(made);
  fs::create_directories(made);
  return made;
}

void write(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << content;
}

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
  if (lists.parts().vocab > most_vocab) return;  // which no model has
  std::vector<std::uint8_t> allowed(lists.parts().vocab);
  std::vector<std::int32_t> source;
  for (std::size_t token = 0; token < lists.parts().sources && token < 1000; ++token) {
    source.push_back(static_cast<std::int32_t>(token));
  }
  lists.allow(source.data(), source.size(), allowed.data());
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

fs::path weights_file() {
  return fs::temp_directory_path() / ("tformer-fuzz-weights-" + std::to_string(::getpid()));
}

/// A program of the model of tests/bundles/v2, over weights that are all zeros; what can be read runs a few steps.
void read_program(const std::string& text) {
  const Json program = parse_json(text);
  if (!program.is_object()) return;
  static const bool made = (write(weights_file(), std::string(1 << 18, '\0')), true);
  static_cast<void>(made);
  Model model;
  model.src_vocab = model.tgt_vocab = 14;
  model.d_model = 16;
  model.heads = 2;
  model.head_dim = 8;
  model.decoder_layers = 1;
  Recipe recipe;
  recipe.target = "native";
  recipe.cache_precision = text.size() % 2 ? "fp32" : "bf16";
  recipe.limits.src_tokens = recipe.limits.tgt_tokens = 16;
  const auto read = std::make_shared<const native::Program>(program, mapped(weights_file()), model, recipe);
  for (const native::Code* code : {&read->encoder(), &read->step(), &read->memory()}) {
    for (const std::int64_t width : code->widths) {
      if (width > 1 << 12) return;  // runs, but slowly
    }
  }
  native::Executor executor(read, model, recipe, {});
  native::NativeState state;
  executor.encode({4, 5, 3, 7, 3, 1}, {3, 2}, state.sentences);
  state.src_width = 3;
  Scores scores;
  for (int step = 0; step < 4; ++step) {
    executor.step({2, 4}, state, 2, {step == 1, step == 2}, scores);
    if (step != 2) continue;
    std::vector<std::int32_t> tokens{1, 3, 13};
    state.listed = std::make_unique<native::ShortlistWeights>(executor.output(), std::move(tokens), executor.blocks());
    state.sentences[0].listed = {0, 2};
    state.sentences[1].listed = {1};
  }
  if (!read->memory().instructions.empty()) executor.memory({4, 5, 3, 7, 3, 1}, {3, 2});
}

void read_graph(const std::string& content) { require_no_control_flow(content, "graph.onnx"); }

/// A bundle with this manifest, whose files are empty, and whose graphs say that they belong to it.
void read_bundle(const std::string& text) {
  const fs::path place = folder();
  write(place / "manifest.json", text);
  const Json manifest = parse_json(text);
  if (!schema_error(manifest, bundle_schema()).empty()) return;  // else no name leads out of the folder
  for (const auto& [name, unused] : manifest["files"].items()) write(place / name, "");
  const Bundle bundle = Bundle::open(place, true);
  std::vector<std::string> variants = {"", "fp32"};
  const Json more = manifest.value("variants", Json::object());
  for (const auto& [name, unused] : more.items()) variants.push_back(name);
  for (const std::string& name : variants) {
    const std::string variant = bundle.chosen(name);
    const Json& part = variant.empty() ? manifest : manifest["variants"][variant];
    bundle.require_kinds(variant);
    bundle.graph_files(graphs_of(bundle.model(), bundle.recipe(variant)), variant);
    bundle.check_metadata("encoder",
                          {{"tformer.graph", "encoder"},
                           {"tformer.weights_sha256", manifest["checkpoint"]["weights_sha256"]},
                           {"tformer.model", manifest["model"].dump()},
                           {"tformer.recipe", part["recipe"].dump()},
                           {"tformer.tokenizers", Json(bundle.tokenizer_hashes()).dump()}},
                          variant);
  }
  make_tokenizers(manifest["tokenizer"], place);
}

constexpr const char* line = "Nine hundred\u3000and ninety-\xC3\x9Fnine [C@H] 3.14 <unk> </s> \xF0\x9F\x8F\xB3";

/// A tokenizer of any kind; what it makes of a line, and of ids that do and do not exist.
void read_tokenizer(const std::string& content) {
  const fs::path place = folder();
  for (const char* name : {"t.model", "t.json", "t.words"}) write(place / name, content);
  for (const char* description : {R"({"kind": "sentencepiece", "file": "t.model"})",
                                  R"({"kind": "words", "file": "t.words"})",
                                  R"({"kind": "words", "file": "t.json", "regex": "\\w+|.", "lower": true})",
                                  R"({"kind": "byte-bpe", "file": "t.json", "space": true})",
                                  R"({"kind": "bpe", "file": "t.json"})"}) {
    try {
      const auto made = make_tokenizer(Json::parse(description), place);
      made->decode(made->encode(line));
      made->decode({-1, 0, 1, 5, 300, made->size() - 1, made->size(), 1 << 30});
    } catch (const Error&) {
    }
  }
}

void read_expression(const std::string& text) {
  if (utf8_problem(text).empty()) word_expression(text.substr(0, text.find('\n')))->find_all(line);  // JSON is UTF-8
}

/// Every reader reads everything; only errors of ours may come.
void read_all(const std::string& content) {
  static const std::map<std::string, std::function<void(const std::string&)>> readers = {
      {"manifest", read_manifest}, {"bundle", read_bundle},   {"tokenizer", read_tokenizer},
      {"lists", read_lists},       {"expression", read_expression},
      {"graph", read_graph},       {"options", read_options}, {"program", read_program}};
  static const char* const wanted = std::getenv("TFORMER_READER");
  for (const auto& [name, reader] : readers) {
    if (wanted && name != wanted) continue;
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
  if (count != 3 && count != 4) {
    std::cerr << "usage: fuzz FOLDER SECONDS [SEED]\n";
    return 2;
  }
  std::vector<std::string> seeds = {"beams=4\nlength_penalty=0.6\nsuppress=4,5\nsampling=true\nthreads=2\n",
                                    R"((?:[^\w\s]|\d{2,3})+?(?=a|$)|[A-Z][a-z]*|(?!b).)",
                                    R"({"entries": ["<s>", "<pad>", "</s>", "<unk>", "a", "ab"], "merges": ["a b"]})"};
  for (const auto& entry : fs::recursive_directory_iterator(arguments[1])) {
    if (!entry.is_regular_file() || entry.file_size() > 1 << 18) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  std::sort(seeds.begin(), seeds.end());  // whatever the file system's order is
  const unsigned seed = count == 4 ? static_cast<unsigned>(std::stoul(arguments[3])) : std::random_device()();
  std::cout << "seed " << seed << std::endl;
  std::mt19937_64 random(seed);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::stol(arguments[2]));
  long runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) read_all(changed(seeds[random() % seeds.size()], random));
  fs::remove_all(folder());
  fs::remove(weights_file());
  std::cout << runs << " changed files of " << seeds.size() << " were read or refused\n";
}
#endif
