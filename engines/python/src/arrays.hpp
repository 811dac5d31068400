// Arrays of Python's caller. A mistake is a TypeError or ValueError: what the argument is called, what was given, and
// what must be given.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace tformer::python {

namespace nb = nanobind;

/// Throws Python's ValueError.
[[noreturn]] inline void refuse(const std::string& name, const std::string& given, const std::string& rule) {
  throw nb::value_error((name + ": " + given + " given: must be " + rule).c_str());
}

/// A copy of an array of whole numbers: other threads of Python may change it meanwhile.
struct Ids {
  std::string name;
  std::vector<std::int32_t> values;
  std::vector<std::size_t> shape;

  /// As Python shows it.
  static std::string shown(const std::vector<std::size_t>& sizes) {
    std::string text;
    for (const std::size_t size : sizes) text += (text.empty() ? "" : ", ") + std::to_string(size);
    return "(" + text + (sizes.size() == 1 ? ",)" : ")");
  }

  /// Throws Python's ValueError.
  void require_shape(bool holds, const std::string& rule) const {
    if (!holds) refuse(name, "an array of shape " + shown(shape), "of shape " + rule);
  }
};

template <typename Array>
void copy(const Array& array, Ids& ids) {
  for (std::size_t i = 0; i < array.ndim(); ++i) ids.shape.push_back(array.shape(i));
  for (std::size_t i = 0; i < array.size(); ++i) {
    const auto value = array.data()[i];
    using Limits = std::numeric_limits<std::int32_t>;
    bool fits = value <= static_cast<decltype(value)>(Limits::max());
    if constexpr (std::is_signed_v<decltype(value)>) fits = fits && value >= Limits::min();
    if (!fits) refuse(ids.name, std::to_string(value), "in the range of int32");
    ids.values.push_back(static_cast<std::int32_t>(value));
  }
}

/// Throws Python's TypeError or ValueError.
inline Ids ids_of(nb::handle given, const char* name, std::size_t axes) {
  using Small = nb::ndarray<const std::int32_t, nb::c_contig, nb::device::cpu>;
  using Signed = nb::ndarray<const std::int64_t, nb::c_contig, nb::device::cpu>;
  using Unsigned = nb::ndarray<const std::uint64_t, nb::c_contig, nb::device::cpu>;
  Ids ids{name, {}, {}};
  Small usual;
  if (nb::try_cast(given, usual, false)) {
    copy(usual, ids);
  } else {  // other whole numbers, and another order of memory; what is no whole number would lose its fraction
    nb::ndarray<nb::ro> any;
    Signed wide;
    Unsigned counts;
    using Code = nb::dlpack::dtype_code;
    const bool is_array = nb::ndarray_check(given) && nb::try_cast(given, any, false);
    const auto code = is_array ? static_cast<Code>(any.dtype().code) : Code::Float;
    if (code == Code::Int && nb::try_cast(given, wide, true)) {
      copy(wide, ids);
    } else if (code == Code::UInt && nb::try_cast(given, counts, true)) {
      copy(counts, ids);
    } else {
      std::string kind = nb::str(given.type().attr("__name__")).c_str();
      if (nb::hasattr(given, "dtype")) kind += std::string(" of ") + nb::str(nb::object(given.attr("dtype"))).c_str();
      throw nb::type_error((ids.name + ": " + kind + " given: must be a numpy array of int32").c_str());
    }
  }
  const std::string rule = std::to_string(axes) + (axes == 1 ? " axis" : " axes");
  if (ids.shape.size() != axes) refuse(ids.name, "an array of shape " + Ids::shown(ids.shape), "an array of " + rule);
  return ids;
}

}  // namespace tformer::python
