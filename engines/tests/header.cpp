// What tformer.hpp does, in a program that is linked statically: header BUNDLE LINE.
#include <array>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <tformer/tformer.hpp>

namespace {

long allocations = -1;  // until one fails; below 0: none does

void require(bool holds, const char* what) {
  if (!holds) throw std::runtime_error(what);
}

/// Lines that are served get what they get in a translation.
void serve(const tformer::Model& model, const std::string& line, const std::string& expected) {
  tformer::Serving serving(model);
  serving.admit(line, 7);
  std::vector<tformer::Served> all;
  for (std::size_t left = 1; left;) {
    left = serving.step();
    for (tformer::Served& it : serving.take()) all.push_back(std::move(it));
  }
  require(all.size() == 1 && all[0].number == 7 && all[0].outputs[0].text == expected, "a served line is another");
}

/// Whether a call throws that.
template <typename Exception, typename Call>
bool throws(const Call& call) {
  try {
    call();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

/// What a callback throws comes out of the call, whose translator goes on.
void stream(const tformer::Model& model, const std::string& line) {
  struct Own {};
  tformer::Translator translator(model);
  require(throws<Own>([&] { translator.stream(line, [](const std::string&) -> bool { throw Own(); }); }), "no throw");
  require(throws<std::invalid_argument>([&] { translator.stream(line, nullptr); }), "an empty callback is called");
  require(throws<tformer::Failure>([&] { translator.stream(line, [](const std::string&) { return false; }); }), "no stop");
  std::string text;
  const auto write = [&text](const std::string& piece) { return !(text += piece).empty(); };
  require(translator.stream(line, write).text == text, "a stream after an exception is another");
}

/// The same of what gets each step, also after a move.
void steps(const tformer::Model& model, const std::string& line) {
  struct Own {};
  tformer::Translator first(model);
  const std::string expected = first.translate({line})[0][0].text;
  std::size_t seen = 0;
  first.on_step([&seen](const std::vector<tformer_candidate>& candidates) { return (seen += candidates.size()) > 0; });
  tformer::Translator translator(std::move(first));
  const tformer::Output output = translator.translate({line})[0][0];
  require(output.text == expected && seen == output.ids.size() + 1, "not each step is seen");
  std::size_t once = 0;
  translator.on_step([&](const std::vector<tformer_candidate>&) {
    translator.on_step(nullptr);
    return ++once > 0;
  });
  require(translator.translate({line})[0][0].text == expected && once == 1, "a step does not end its own calls");
  translator.on_step([](const std::vector<tformer_candidate>&) -> bool { throw Own(); });
  require(throws<Own>([&] { translator.translate({line}); }), "no throw of a step");
  require(throws<Own>([&] { translator.generate({model.source_ids(line)}); }), "no throw of a step of ids");
  require(throws<Own>([&] { translator.stream(line, [](const std::string&) { return true; }); }), "no throw in a stream");
  translator.on_step([](const std::vector<tformer_candidate>&) { return false; });
  require(throws<tformer::Failure>([&] { translator.translate({line}); }), "a step does not stop the call");
  translator.on_step(nullptr);
  require(translator.translate({line})[0][0].text == expected, "a call after an exception is another");
}

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

/// A bundle in memory is what its folder is; what its function throws comes out of the call.
void files(const std::string& folder, const std::string& line, const std::string& expected) {
  struct Own {};
  const tformer::Options native = {{"backend", "native"}};
  const auto read = [&folder](const std::string& name) -> std::optional<tformer::File> {
    const std::string path = folder + "/" + name;
    if (!std::ifstream(path)) return std::nullopt;
    return content_of(path);
  };
  const std::string manifest = content_of(folder + "/manifest.json");
  const auto borrowed = [&](const std::string& name) -> std::optional<tformer::File> {
    if (name == "manifest.json") return tformer::File(manifest.data(), manifest.size());
    return read(name);
  };
  const auto none = [](const std::string&) -> std::optional<tformer::File> { return std::nullopt; };
  for (const tformer::Files& each : {tformer::Files(read), tformer::Files(borrowed)}) {
    const tformer::Model model(each, native);
    const auto output = tformer::Translator(model, {{"beams", "4"}}).translate({line})[0][0];
    require(output.text == expected, "a model in memory is another");
    require(model.target_text(output.ids) == expected, "the text of ids is another");
    require(expected.rfind(model.target_text({output.ids[0]}, false), 0) == 0, "a settled text is no beginning");
  }
  require(throws<Own>([&] {
            tformer::Model([&](const std::string& name) -> std::optional<tformer::File> {
              if (name != "manifest.json") throw Own();
              return read(name);
            }, native);
          }), "what a function throws is lost");
  require(throws<Own>([] { tformer::Bundle([](const std::string&) -> std::optional<tformer::File> { throw Own(); }); }),
          "what a function throws is lost");
  require(throws<tformer::Failure>([&] { tformer::Model(none, native, "nothing"); }), "a bundle of nothing");
  require(throws<std::invalid_argument>([&] { tformer::Model(tformer::Files(), native); }), "no function");
  const auto names = [](const tformer::Bundle& bundle) {
    std::string all;
    for (const tformer::Variant& each : bundle.variants()) all += each.backend + ":" + each.name + " ";
    return all;
  };
  require(names(tformer::Bundle(folder)) == names(tformer::Bundle(read)), "a bundle in memory has other variants");
  require(names(tformer::Bundle(folder)).find("native:") != std::string::npos, "no program is listed");
  require(tformer::Bundle(folder).options().size() == tformer::Bundle::all_options().size(), "other options");
}

/// What opening a model decides is logged, until nobody listens; what a callback throws is dropped.
void logs(const std::string& folder) {
  const auto heard = std::make_shared<int>(0);
  tformer::on_log([heard](tformer_level level, const std::string& message) {
    if (level == TFORMER_LOG_INFO && message.find("native") != std::string::npos) ++*heard;
    tformer::on_log(nullptr);  // not inside a lock
    throw 1;
  });
  const tformer::Model model(folder, {{"backend", "native"}});
  require(*heard == 1 && heard.use_count() == 1, "a log is not heard once, or kept");
}

/// A name, value or folder with a zero byte is not taken for what stands before it.
void zero_bytes(const tformer::Model& model, const std::string& folder) {
  const std::string behind("\0x", 2);
  const auto refused = [](const auto& call) { return throws<std::invalid_argument>(call); };
  require(refused([&] { tformer::Translator(model, {{"beams" + behind, "2"}}); }), "a name is cut at a zero byte");
  require(refused([&] { tformer::Translator(model, {{"beams", "2" + behind}}); }), "a value is cut at a zero byte");
  require(refused([&] { tformer::Model(folder + behind, {{"backend", "native"}}); }), "a folder is cut at a zero byte");
}

/// Every line that has ended is taken once, at whatever allocation memory ends. Returns whether it ended.
bool take(const tformer::Model& model, const std::string& line, const std::string& expected, long at) {
  constexpr std::size_t lines = 5;
  tformer::Serving serving(model);
  for (std::uint64_t i = 0; i < lines; ++i) serving.admit(line, i);
  while (serving.step()) continue;
  std::vector<tformer::Served> all;
  allocations = at;
  try {
    all = serving.take();
  } catch (const std::exception&) {  // of no line at all
  }
  const bool ended = allocations < 0;
  allocations = -1;
  for (tformer::Served& it : serving.take()) all.push_back(std::move(it));
  std::array<bool, lines> taken{};
  for (const tformer::Served& it : all) {
    require(!taken.at(it.number), "a line is taken twice");
    taken[it.number] = true;
    const bool whole = it.status == TFORMER_OK && it.outputs.at(0).text == expected;
    require(whole || (it.status == TFORMER_NO_MEMORY && !it.message.empty()), "a taken line is another");
  }
  require(all.size() == lines, "a line is lost where memory ends");
  return ended;
}

}  // namespace

void* operator new(std::size_t size) {
  if (allocations >= 0 && allocations-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int count, char** arguments) try {
  require(count == 3, "usage: header BUNDLE LINE");
  const tformer::Model model(arguments[1], {{"backend", "native"}});
  tformer::Translator translator(model, {{"beams", "4"}});
  const std::string text = translator.translate({arguments[2]})[0][0].text;
  std::cout << text << '\n';
  serve(model, arguments[2], text);
  stream(model, arguments[2]);
  steps(model, arguments[2]);
  zero_bytes(model, arguments[1]);
  files(arguments[1], arguments[2], text);
  logs(arguments[1]);
  require(tformer::version() == TFORMER_VERSION, "a header of another version");
  for (long at = 0; take(model, arguments[2], text, at); ++at) continue;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
