#include "bundles.hpp"

#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <utility>

#include "listing.hpp"
#include "log.hpp"

namespace tformer::python {
namespace {

/// An object that any thread may let go of.
std::shared_ptr<const nb::object> kept(nb::handle object) {
  return {new nb::object(nb::borrow(object)), [](const nb::object* it) {
            if (!nb::is_alive()) return;  // the process ends
            const nb::gil_scoped_acquire held;
            delete it;
          }};
}

/// The bytes of a bytes-like object, which it keeps in place until the last copy is gone. Throws Python's TypeError.
Content content_of(nb::handle bytes) {
  auto view = std::make_unique<Py_buffer>();
  if (PyObject_GetBuffer(bytes.ptr(), view.get(), PyBUF_SIMPLE) != 0) throw nb::python_error();
  const void* const data = view->buf;
  const auto size = static_cast<std::size_t>(view->len);
  return {data, size, std::shared_ptr<const void>(view.release(), [](void* it) {
            if (!nb::is_alive()) return;
            const nb::gil_scoped_acquire held;
            const std::unique_ptr<Py_buffer> own(static_cast<Py_buffer*>(it));
            PyBuffer_Release(own.get());
          })};
}

std::optional<Content> read(nb::handle files, bool mapping, const std::string& name) {
  const nb::gil_scoped_acquire held;
  nb::object found;
  try {
    found = mapping ? nb::steal(PyObject_GetItem(files.ptr(), nb::str(name.c_str()).ptr())) : files(name);
    if (!found.is_valid()) throw nb::python_error();
  } catch (const nb::python_error& error) {
    if (error.matches(mapping ? PyExc_KeyError : PyExc_FileNotFoundError)) return std::nullopt;
    throw;
  }
  if (found.is_none()) return std::nullopt;
  return content_of(found);
}

nb::list variants(nb::handle bundle, const std::string& name) {
  const Folder folder = folder_of(bundle, name);
  std::vector<VariantInfo> found;
  {
    const nb::gil_scoped_release others;
    found = variants_about(Bundle::open(folder, true));
  }
  nb::list all;
  for (const VariantInfo& it : found) {
    nb::dict one;
    one["name"] = it.name;
    one["backend"] = it.backend;
    one["precision"] = it.precision;
    one["source_tokens"] = it.limits.src_tokens;
    one["target_tokens"] = it.limits.tgt_tokens;
    one["beams"] = it.limits.beams;
    one["is_default"] = it.is_default;
    one["attention"] = it.attention;
    one["shortlist"] = it.shortlist;
    all.append(one);
  }
  return all;
}

nb::list options(nb::handle bundle, const std::string& name) {
  std::vector<OptionInfo> found;
  if (bundle.is_none()) {
    found = options_about(DecodeOptions());
  } else {
    const Folder folder = folder_of(bundle, name);
    const nb::gil_scoped_release others;
    found = options_about(Bundle::open(folder, true));
  }
  nb::list all;
  for (const OptionInfo& it : found) {
    nb::dict one;
    one["name"] = it.name;
    one["type"] = it.kind;
    one["value"] = it.value;
    one["values"] = it.values;
    one["help"] = it.help;
    one["least"] = it.least;
    one["most"] = it.most;
    all.append(one);
  }
  return all;
}

void on_log(nb::handle callback) {
  if (callback.is_none()) return set_log(nullptr);
  if (!nb::isinstance<nb::callable>(callback)) throw nb::type_error("callback: must be a function, or None");
  set_log([own = kept(callback)](Level level, const std::string& message) {
    if (!nb::is_alive()) return;
    const nb::gil_scoped_acquire held;
    try {
      (*own)(static_cast<int>(level), message);
    } catch (nb::python_error& error) {
      error.restore();
      PyErr_WriteUnraisable(own->ptr());
    }
  });
}

}  // namespace

Folder folder_of(nb::handle bundle, const std::string& name) {
  if (nb::isinstance<nb::str>(bundle)) return Folder(std::filesystem::path(nb::cast<std::string>(bundle)));
  const bool called = nb::isinstance<nb::callable>(bundle);
  if (!called && (PyMapping_Check(bundle.ptr()) == 0 || PySequence_Check(bundle.ptr()) != 0 || PyObject_CheckBuffer(bundle.ptr()) != 0)) {
    throw nb::type_error("bundle: must be a folder's path as str, a mapping of names to bytes, or a function");
  }
  auto source = std::make_shared<Source>(
      [own = kept(bundle), called](const std::string& file) { return read(*own, !called, file); });
  return {std::move(source), name};
}

void add_bundles(nb::module_& module) {
  using namespace nb::literals;
  module.def("variants", variants, "bundle"_a, "name"_a = "memory");
  module.def("options", options, "bundle"_a.none() = nb::none(), "name"_a = "memory");
  module.def("on_log", on_log, "callback"_a.none());
  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { set_log(nullptr); }));
}

}  // namespace tformer::python
