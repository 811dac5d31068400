// Bundles as Python gives them: a folder, a mapping, or a function; what they say of themselves; and the library's log.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "bundle/source.hpp"

namespace tformer::python {

namespace nb = nanobind;

/// `bundle`: a folder's path; a mapping from names of files to bytes-like objects; or a function from a name to one, or
/// to None. `name` is what messages call it. Throws Python's TypeError for anything else.
Folder folder_of(nb::handle bundle, const std::string& name);

/// Add `variants`, `options` and `on_log` to the module.
void add_bundles(nb::module_& module);

}  // namespace tformer::python
