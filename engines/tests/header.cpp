// What tformer.hpp does, in a program that is linked statically: header BUNDLE LINE.
#include <cstdlib>
#include <iostream>
#include <new>
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
  std::vector<bool> taken(lines);
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
  zero_bytes(model, arguments[1]);
  for (long at = 0; take(model, arguments[2], text, at); ++at) continue;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
