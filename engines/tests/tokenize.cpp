// Tokenizers as a program, for tests/test_cpp_text.py: tokenize DESCRIPTION FOLDER. A line of JSON in, one out:
//   "text" -> what the encoder sees; [ids] -> their text; {"lower": text}, {"strip": text}, {"split": text};
//   {"settled": [ids]} -> the text that further ids cannot change;
//   {"replaced": [bytes]}, {"problem": [bytes]} -> text; {"entry": text} -> its id in the target vocabulary, or -1.
#include <fstream>
#include <iostream>

#include "errors.hpp"
#include "text/tokenizer.hpp"
#include "text/unicode.hpp"

using nlohmann::json;

namespace {

std::string bytes_of(const json& numbers) {
  std::string bytes;
  for (const json& each : numbers) bytes += static_cast<char>(each.get<unsigned char>());
  return bytes;
}

json answer(const tformer::Tokenizers& tokenizers, const json& asked) {
  if (asked.is_string()) return tokenizers.source_ids(asked.get<std::string>());
  if (asked.is_array()) return tokenizers.target->decode(asked.get<tformer::Ids>());
  const std::string name = asked.begin().key();
  const json& value = asked.begin().value();
  if (name == "lower") return tformer::lower(value.get<std::string>());
  if (name == "entry") return tokenizers.target->id_of(value.get<std::string>());
  if (name == "strip") return std::string(tformer::stripped(value.get<std::string>()));
  if (name == "settled") return tokenizers.settled_text(value.get<tformer::Ids>());
  if (name == "replaced") return tformer::utf8_replaced(bytes_of(value));
  if (name == "problem") return std::string(tformer::utf8_problem(bytes_of(value)));
  json words = json::array();
  const auto text = value.get<std::string>();
  for (const std::string_view word : tformer::split(text)) words.push_back(std::string(word));
  return words;
}

}  // namespace

int main(int count, char** words) {
  try {
    if (count != 3) throw tformer::Error(tformer::Status::usage, "tokenize DESCRIPTION FOLDER");
    std::ifstream file(words[1]);
    const auto tokenizers = tformer::make_tokenizers(json::parse(file), std::filesystem::path(words[2]));
    for (std::string line; std::getline(std::cin, line);) {
      try {
        std::cout << answer(tokenizers, json::parse(line)).dump() << '\n';
      } catch (const tformer::Error& error) {
        std::cout << json{{"error", error.what()}}.dump() << '\n';
      }
    }
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
