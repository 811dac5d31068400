#include "open_model.hpp"

#include <algorithm>

#include "cores.hpp"
#include "errors.hpp"
#include "listing.hpp"
#include "text/unicode.hpp"

namespace tformer {
namespace {

/// Throws Error where a model lacks an entry of its tokenizers, or has other special ids than the target's.
void require_fit(const Bundle& bundle, const Tokenizers& tokenizers) {
  const Model& model = bundle.model();
  const auto refuse = [&bundle](const std::string& why) {
    throw Error(Status::bundle, bundle.directory().string() + ": " + why +
                                    ", and export it again; or copy it again, if manifest.json was edited");
  };
  const auto check_size = [&refuse](const char* side, std::int32_t ours, const Tokenizer& tokenizer) {
    const Specials& specials = tokenizer.specials;
    std::int32_t last = std::max({specials.pad, specials.bos, specials.eos, specials.unk});
    for (const std::int32_t id : specials.others) last = std::max(last, id);
    const std::int32_t entries = std::max(tokenizer.size(), last + 1);
    if (ours < entries) {
      refuse(std::string("model.") + side + "=" + std::to_string(ours) + " is smaller than the tokenizer's " +
             std::to_string(entries) + " entries: give the model as many");
    }
  };
  check_size("src_vocab", model.src_vocab, *tokenizers.source);
  check_size("tgt_vocab", model.tgt_vocab, *tokenizers.target);
  for (const Ids* around : {&tokenizers.prefix, &tokenizers.suffix}) {
    for (const std::int32_t id : *around) {
      if (id < 0 || id >= model.src_vocab) {
        refuse("what stands around a source, id " + std::to_string(id) + ", is not in model.src_vocab=" +
               std::to_string(model.src_vocab));
      }
    }
  }
  const Specials& target = tokenizers.target->specials;
  const auto check_special = [&refuse](const char* name, std::int32_t ours, std::int32_t theirs) {
    if (theirs == ours || theirs == -1) return;
    refuse(std::string("model.") + name + "_id=" + std::to_string(ours) + ", but the target tokenizer's " + name +
           " is " + std::to_string(theirs) + ": give the model the tokenizer's");
  };
  check_special("pad", model.pad_id, target.pad);
  check_special("bos", model.bos_id, target.bos);
  check_special("eos", model.eos_id, target.eos);
}

}  // namespace

OpenModel::OpenModel(const Folder& folder, const Settings& settings) {
  const auto kept = folder.keep();
  const auto bundle = std::make_shared<const Bundle>(Bundle::open(folder, settings.open.verify));
  decoding_ = decoding_of(*bundle);
  open_tokenizers(*bundle);
  OpenOptions open = settings.open;
  if (!open.threads) open.threads = std::max(1, cores() / static_cast<int>(settings.workers));
  backend_ = open_backend(bundle, open);
  variant_ = backend_->variant();
}

void OpenModel::open_tokenizers(const Bundle& bundle) {
  std::vector<std::string> names;
  for (const auto& [name, unused] : bundle.tokenizer_hashes()) names.push_back(name);
  bundle.verify(names);
  tokenizers_ = make_tokenizers(bundle.manifest()["tokenizer"], bundle.directory());
  require_fit(bundle, tokenizers_);
}

namespace {

std::string_view text_of(std::string_view text) {
  const std::string_view problem = utf8_problem(text);
  if (!problem.empty()) throw Error(Status::text, "text: not UTF-8 (" + std::string(problem) + "): convert it");
  return stripped(text);
}

}  // namespace

Ids source_ids(const OpenModel& model, std::string_view text) { return model.tokenizers().source_ids(text_of(text)); }

Ids target_ids(const OpenModel& model, std::string_view text) { return model.tokenizers().target_ids(text_of(text)); }

std::int32_t target_entry(const OpenModel& model, std::string_view entry) {
  const std::string name(entry);
  const std::int32_t id = model.tokenizers().target->id_of(name);
  if (id >= 0) return id;
  throw Error(Status::usage, "'" + name + "' is not in the vocabulary: tformer score --tokens shows how text is split");
}

}  // namespace tformer
