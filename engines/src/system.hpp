// What operating systems do differently; files in memory are in bundle/content.cpp, exported symbols in cmake/exports.cmake.
#pragma once

#include <cstddef>
#include <string>

namespace tformer::system {

/// The number of this process; another one in a forked process.
long process();

/// CPUs that this process may run on; 0: unknown.
int cores();

/// Give an environment variable a value, if it has none.
void set_default(const char* name, const char* value);

/// Memory at an address that is a multiple of `alignment`, as `bytes` must be; null if there is none.
void* allocate(std::size_t alignment, std::size_t bytes);

/// Give memory of `allocate` back.
void release(void* memory);

/// Load a shared library; null, and the system's reason in `why`, if that fails.
void* open_library(const std::string& name, std::string& why);

/// The address of an exported symbol; null if there is none.
void* symbol(void* library, const char* name);

}  // namespace tformer::system
