// The part of the C API that reads bundles, and its log.
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "api.hpp"
#include "listing.hpp"
#include "log.hpp"

using tformer::Content;
using tformer::Error;
using tformer::Folder;
using tformer::Status;
using tformer::guarded;
using tformer::require;

struct tformer_bundle {
  std::vector<tformer::VariantInfo> variants;
  std::vector<tformer::OptionInfo> options;
  std::vector<tformer_variant> c_variants;
  std::vector<tformer_option> c_options;
};

namespace {

using Closing = std::shared_ptr<const void>;

/// Closes the files when the last copy is gone.
Closing closing(const tformer_files& files) {
  return {files.user, [close = files.close](void* user) {
            if (close) close(user);
          }};
}

/// What a callback's status says of a file. Throws Error for all but success and a file that is not there.
bool found(tformer_status status, const std::string& path) {
  if (status == TFORMER_OK) return true;
  if (status == TFORMER_MISSING) return false;
  if (status == TFORMER_NO_MEMORY) throw std::bad_alloc();
  if (status == TFORMER_CANCELLED) throw Error(Status::cancelled, "the callback stopped the call");
  throw Error(Status::bundle, path + " cannot be read: its callback returned " +
                                  std::to_string(static_cast<int>(status)) + ": look there for the reason");
}

/// A folder of the files that the caller reads. They are closed if this throws.
Folder folder_of(const tformer_files& files, Closing closed) {
  if (!files.read) {
    require(files.name, "the folder's name");
    return Folder(std::filesystem::path(files.name));
  }
  const std::string shown = files.name ? files.name : "memory";
  auto read = [files, shown, closed = std::move(closed)](const std::string& name) -> std::optional<Content> {
    tformer_content content{};
    const std::string path = shown + "/" + name;
    if (!found(files.read(files.user, name.c_str(), &content), path)) return std::nullopt;
    std::shared_ptr<const void> owner(content.data, [files, closed, content](const void*) {
      if (files.release) files.release(files.user, &content);
    });
    if (content.size && !content.data) {
      throw Error(Status::bundle, path + " cannot be read: its callback gave " + std::to_string(content.size) +
                                      " bytes at a null pointer: give their address");
    }
    return Content(content.data, content.size, std::move(owner));
  };
  return Folder(std::make_shared<tformer::Source>(std::move(read)), shown);
}

std::vector<tformer_option> c_options(const std::vector<tformer::OptionInfo>& options) {
  std::vector<tformer_option> all;
  for (const tformer::OptionInfo& it : options) {
    all.push_back({it.name.c_str(), it.kind.c_str(), it.value.c_str(), it.values.c_str(), it.help.c_str(), it.least,
                   it.most});
  }
  return all;
}

std::vector<tformer_variant> c_variants(const std::vector<tformer::VariantInfo>& variants) {
  std::vector<tformer_variant> all;
  for (const tformer::VariantInfo& it : variants) {
    all.push_back({it.name.c_str(), it.backend.c_str(), it.precision.c_str(),
                   static_cast<std::size_t>(it.limits.src_tokens), static_cast<std::size_t>(it.limits.tgt_tokens),
                   static_cast<std::size_t>(it.limits.beams), it.is_default, it.attention, it.shortlist});
  }
  return all;
}

template <typename Item>
const Item* item(const std::vector<Item>& items, std::size_t number) {
  return number < items.size() ? &items[number] : nullptr;
}

}  // namespace

extern "C" {

tformer_status tformer_on_log(tformer_log_callback callback, void* user, void (*release)(void* user)) {
  return guarded([&] {
    const std::shared_ptr<void> released(user, [release](void* it) {
      if (release) release(it);
    });
    if (!callback) return tformer::set_log(nullptr);
    tformer::set_log([callback, released](tformer::Level level, const std::string& message) {
      callback(released.get(), static_cast<tformer_level>(level), message.c_str());
    });
  });
}

tformer_status tformer_bundle_open(const tformer_files* files, tformer_bundle** bundle) {
  return guarded([&] {
    require(files, "files");
    const Folder folder = folder_of(*files, closing(*files));
    require(bundle, "bundle");
    *bundle = nullptr;
    const auto read = tformer::Bundle::open(folder, true);
    auto made = std::make_unique<tformer_bundle>();
    made->variants = tformer::variants_about(read);
    made->options = tformer::options_about(read);
    made->c_variants = c_variants(made->variants);
    made->c_options = c_options(made->options);
    *bundle = made.release();
  });
}

void tformer_bundle_close(tformer_bundle* bundle) { delete bundle; }

const tformer_variant* tformer_bundle_variant(const tformer_bundle* bundle, size_t number) {
  return bundle ? item(bundle->c_variants, number) : nullptr;
}

const tformer_option* tformer_bundle_option(const tformer_bundle* bundle, size_t number) {
  if (bundle) return item(bundle->c_options, number);
  try {
    static const auto& options = *new std::vector<tformer::OptionInfo>(tformer::options_about(tformer::DecodeOptions()));
    static const auto& own = *new std::vector<tformer_option>(c_options(options));
    return item(own, number);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

tformer_status tformer_model_open_files(const tformer_files* files, const tformer_options* options,
                                        tformer_model** model) {
  return guarded([&] {
    require(files, "files");
    const Folder folder = folder_of(*files, closing(*files));
    require(model, "model");
    *model = nullptr;
    const tformer::Settings settings = options ? options->settings : tformer::Settings();
    *model = new tformer_model{std::make_shared<const tformer::OpenModel>(folder, settings)};
  });
}

tformer_status tformer_target_text(const tformer_model* model, tformer_ids ids, int ended, tformer_text* text) {
  return guarded([&] {
    require(text, "text");
    *text = {nullptr, 0};
    require(model, "model");
    if (ids.size) require(ids.data, "ids");
    const tformer::Ids all(ids.data, ids.data + ids.size);
    const tformer::Tokenizers& tokenizers = model->open->tokenizers();
    const std::string found = ended ? tokenizers.target->decode(all) : tokenizers.settled_text(all);
    auto copy = std::make_unique<char[]>(found.size() + 1);
    found.copy(copy.get(), found.size());
    text->size = found.size();
    text->data = copy.release();
  });
}

void tformer_text_free(tformer_text* text) {
  if (!text) return;
  delete[] text->data;
  *text = {nullptr, 0};
}

}  // extern "C"
