// Memory that ends within the library, at one allocation after the other: no_memory BUNDLE VARIANT LINE...
// Every call must end in a status, and the next call must work. Allocations of ONNX Runtime do not fail here, as it
// crashes then, and the bundle's tokenizers must not be sentencepiece's, which crashes too.
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

/// Call with ever more allocations before one fails, until none does.
template <typename Call>
long failures(const Call& call) {
  long count = 0;
  for (long at = 0;; ++at, ++count) {
    left = at;
    const tformer_status status = call();
    const bool all = left.exchange(-1) >= 0;
    const bool expected = status == TFORMER_OK || status == TFORMER_NO_MEMORY;
    if (!expected || (all && status != TFORMER_OK)) {
      throw std::runtime_error("allocation " + std::to_string(at) + ": " + tformer_error());
    }
    if (all) return count;
  }
}

}  // namespace

void* operator new(std::size_t size) {
  if (left >= 0 && of_library(__builtin_return_address(0)) && left-- == 0) throw std::bad_alloc();
  if (void* memory = std::malloc(size ? size : 1)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main(int count, char** arguments) try {
  if (count < 4) throw std::invalid_argument("usage: no_memory BUNDLE VARIANT LINE...");
  const tformer::Options options = {{"variant", arguments[2]}, {"threads", "1"}};
  const std::vector<std::string> lines(arguments + 3, arguments + count);
  const tformer::Model model(arguments[1], options);
  tformer::Translator translator(model, {{"workers", "3"}, {"beams", "2"}});
  const std::string expected = translator.translate(lines)[0][0].text;
  const std::vector<tformer_text> texts = tformer::detail::texts(lines);
  const long ended = failures([&] {
    tformer_results* results = nullptr;
    const tformer_status status =
        tformer_translate(translator.get(), texts.data(), nullptr, texts.size(), 0, &results);
    tformer_results_free(results);
    return status;
  });
  if (translator.translate(lines)[0][0].text != expected) throw std::runtime_error("the next call differs");
  std::cout << ended << " calls ended where memory did\n";
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
