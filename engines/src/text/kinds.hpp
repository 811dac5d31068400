// Makes each kind of tokenizer from its files. All throw Error for damaged files.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "text/tokenizer.hpp"

namespace tformer {

struct WordsHow {
  std::string language;              ///< a code of spaCy's; empty: none
  std::optional<std::string> regex;  ///< each match is a word
  bool lower = false;
};

struct BpeFile {
  std::vector<std::string> entries;
  std::vector<std::string> merges;
};

/// An added token, which is matched in text as it is. Fields as in the library `tokenizers`.
struct AddedToken {
  std::int32_t id;
  bool lstrip, rstrip;  ///< it takes the white space on its left, on its right
  bool single_word;     ///< not inside a word
  bool normalized;      ///< it is matched in normalized text
  bool piece;           ///< ordinary tokenization may produce it too
};

/// What transformers does before and after a tokenizer.
struct Around {
  std::vector<AddedToken> tokens;
  bool python = false;     ///< text is split as by the slow tokenizer in Python, not as by the library `tokenizers`
  bool normalize = false;  ///< normalized text is that of the sentencepiece model
  bool edges = false;      ///< several spaces are one, and one at a part's end is a piece
  bool clean_up = false;   ///< outputs lose the space before punctuation
};

/// What a sentencepiece model does to characters; spaces are left as they are.
std::function<std::string(const std::string&)> normalizer_of(const std::string& model);

/// `model`: a sentencepiece model, which normalizes text.
std::unique_ptr<Tokenizer> make_wrapped(std::unique_ptr<Tokenizer> inner, Around around, const std::string& model);
std::unique_ptr<Tokenizer> make_words(std::vector<std::string> words, Specials specials, const WordsHow& how);
std::unique_ptr<Tokenizer> make_sentencepiece(const std::string& model, Specials specials);
std::unique_ptr<Tokenizer> make_pieces(const std::string& model, std::vector<std::string> entries, Specials specials);
/// `space`: a text begins with a space if it does not already.
std::unique_ptr<Tokenizer> make_byte_bpe(BpeFile file, Specials specials, bool space);
/// `inner` is put behind every piece of a word but the last, `final` behind that.
std::unique_ptr<Tokenizer> make_word_bpe(BpeFile file, Specials specials, std::string inner, std::string final);

}  // namespace tformer
