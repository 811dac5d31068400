// c++ -std=c++17 minimal.cpp $(pkg-config --cflags --libs tformer) -Wl,-rpath,/opt/tformer/lib
// Installed in /opt/tformer, as docs/cpp.md says, it needs PKG_CONFIG_PATH=/opt/tformer/lib/pkgconfig. Run it with
// TFORMER_ONNXRUNTIME=.../libonnxruntime.so.1.31.1 ./a.out BUNDLE LINE
#include <iostream>
#include <tformer/tformer.hpp>

int main(int count, char** arguments) try {
  if (count != 3) throw std::invalid_argument("usage: minimal BUNDLE LINE");
  const tformer::Model model(arguments[1]);
  tformer::Translator translator(model, {{"beams", "4"}});
  std::cout << translator.translate({arguments[2]})[0][0].text << '\n';
} catch (const std::exception& error) {
  std::cerr << error.what() << '\n';
  return 1;
}
