// Memory that ends within the library, at one allocation after the other: no_memory BUNDLE BACKEND VARIANT LINE...
// Every call must end in a status, and the next call of the same translator must work. Allocations of ONNX Runtime do not
// fail here, as it crashes then, and the bundle's tokenizers must not be sentencepiece's, which crashes too.
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>
#include <string>
#include <tformer/tformer.hpp>

namespace {

std::atomic<long> left{-1};  // allocations of the library until one fails; below 0: none does

bool of_library(const void* caller) {
  Dl_info info;
  return ::dladdr(caller, &info) && info.dli_fname && std::strstr(info.dli_fname, "libtformer");
}

/// Whether this allocation is the one that fails.
bool fails(const void* caller) { return left >= 0 && of_library(caller) && left-- == 0; }

}  // namespace

void* operator new(std::size_t size) {
  if (fails(__builtin_return_address(0))) throw std::bad_alloc();
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
extern "C" void* aligned_alloc(std::size_t alignment, std::size_t size) noexcept {  // caches
  void* memory = nullptr;
  if (fails(__builtin_return_address(0)) || ::posix_memalign(&memory, alignment, size) != 0) return nullptr;
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

/// Lines that share steps, the second of which joins: all come in the end, each as it should or with what was wrong.
/// True: memory did not end.
bool serve(const tformer::Model& model, const std::vector<std::string>& lines, const tformer::Outputs& expected, long at) {
  const tformer::Serving serving(model, {{"beams", "2"}});
  const auto require = [at](bool holds, const char* what) {
    if (!holds) throw std::runtime_error("serving, allocation " + std::to_string(at) + ": " + what);
  };
  const auto again = [&require](const auto& call) {  // once more where memory ended
    tformer_status status = call();
    if (status == TFORMER_NO_MEMORY) status = call();
    require(status == TFORMER_OK, tformer_error());
  };
  std::size_t known = 0, taken = 0, on_their_way = 1;
  left = at;
  while (known < lines.size() || on_their_way) {
    if (known < lines.size()) {
      again([&] {
        return tformer_admit(serving.get(), {lines[known].data(), lines[known].size()}, {"", 0}, nullptr, known);
      });
      ++known;
    }
    again([&] { return tformer_step(serving.get(), &on_their_way); });
  }
  for (; taken < lines.size(); ++taken) {
    std::uint64_t number = lines.size();
    tformer_results* results = nullptr;
    tformer_status status = tformer_take(serving.get(), &number, &results);
    if (!results) status = tformer_take(serving.get(), &number, &results);
    require(results && number < lines.size(), "a line did not come");
    if (status == TFORMER_OK) {
      const tformer_output& found = *tformer_results_output(results, 0, 0);
      require(std::string(found.text, found.text_size) == expected[number][0].text, "a line differs");
    }
    require(status == TFORMER_OK || status == TFORMER_NO_MEMORY, tformer_error());
    tformer_results_free(results);
  }
  return left.exchange(-1) >= 0;
}

/// A line that joins another one, while memory ends at one allocation; `alone`: there was none for its caches, and the
/// other one went on. True: memory did not end.
bool join(const tformer::Model& model, const std::vector<std::string>& lines, long at, bool& alone) {
  tformer::Serving serving(model, {{"beams", "2"}, {"endless", "true"}, {"max_tokens", "12"}});
  serving.admit(lines[0], 0);
  serving.step();
  serving.step();
  left = at;
  const auto admit = [&] {
    return tformer_admit(serving.get(), {lines[1].data(), lines[1].size()}, {"", 0}, nullptr, 1);
  };
  if (admit() != TFORMER_OK) tformer::check(admit());
  tformer_step(serving.get(), nullptr);
  const bool all = left.exchange(-1) >= 0;
  while (serving.step()) {}
  bool first = false, second = false;
  for (const tformer::Served& line : serving.take()) {
    if (line.number == 0) first = line.status == TFORMER_OK;
    else second = line.message.rfind("no memory for caches", 0) == 0;
  }
  alone |= first && second;
  return all;
}

int main(int count, char** arguments) try {
  if (count < 5) throw std::invalid_argument("usage: no_memory BUNDLE BACKEND VARIANT LINE...");
  const tformer::Options options = {{"backend", arguments[2]}, {"variant", arguments[3]}, {"threads", "1"}};
  const std::vector<std::string> lines(arguments + 4, arguments + count);
  const tformer::Model model(arguments[1], options);
  const auto expected = tformer::Translator(model, {{"beams", "2"}}).translate(lines);
  const std::vector<tformer_text> texts = tformer::detail::texts(lines);
  for (long at = 0;; ++at) {
    tformer::Translator translator(model, {{"workers", "3"}, {"beams", "2"}});
    tformer_results* results = nullptr;
    left = at;
    const tformer_status status = tformer_translate(translator.get(), texts.data(), nullptr, texts.size(), 0, &results);
    const bool all = left.exchange(-1) >= 0;
    tformer_results_free(results);
    const bool known = status == TFORMER_OK || status == TFORMER_NO_MEMORY;
    if (!known || (all && status != TFORMER_OK)) {
      throw std::runtime_error("allocation " + std::to_string(at) + ": " + tformer_error());
    }
    const auto again = translator.translate(lines);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (again[i][0].text != expected[i][0].text || again[i][0].score != expected[i][0].score) {
        throw std::runtime_error("allocation " + std::to_string(at) + ": the next call differs");
      }
    }
    if (!all) continue;
    std::cout << at << " calls ended where memory did\n";
    break;
  }
  const bool joins = count > 5 && std::string(arguments[3]) != "fp32";  // the standard graphs take no lines that join
  for (long at = 0; joins && !serve(model, lines, expected, at);) ++at;
  bool alone = false;
  for (long at = 0; joins && !join(model, lines, at, alone);) ++at;
  const bool moves = std::string(arguments[2]) == "ort";  // the caches of the lines that run, so that all are lost
  if (joins && alone == moves) throw std::runtime_error("a line that finds no memory to join: the other one's end is wrong");
  return 0;
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
