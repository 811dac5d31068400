#include "system.hpp"

#include <cstdlib>

#ifdef _WIN32
#define NOMINMAX
#include <malloc.h>
#include <windows.h>

#include <bitset>
#include <filesystem>
#include <system_error>
#else
#include <dlfcn.h>
#include <unistd.h>
#endif
#ifdef __linux__
#include <sched.h>
#endif

namespace tformer::system {

#ifdef _WIN32

long process() { return static_cast<long>(::GetCurrentProcessId()); }

int cores() {
  DWORD_PTR own = 0, all = 0;  // of its group of at most 64
  if (!::GetProcessAffinityMask(::GetCurrentProcess(), &own, &all)) return 0;
  return static_cast<int>(std::bitset<64>(own).count());
}

void set_default(const char* name, const char* value) {
  if (!std::getenv(name)) ::_putenv_s(name, value);
}

void* allocate(std::size_t alignment, std::size_t bytes) { return ::_aligned_malloc(bytes, alignment); }

void release(void* memory) { ::_aligned_free(memory); }

void* open_library(const std::string& name, std::string& why) {
  void* library = ::LoadLibraryW(std::filesystem::u8path(name).c_str());
  if (!library) why = name + ": " + std::system_category().message(static_cast<int>(::GetLastError()));
  return library;
}

void* symbol(void* library, const char* name) {
  return reinterpret_cast<void*>(::GetProcAddress(static_cast<HMODULE>(library), name));
}

#else

long process() { return ::getpid(); }

int cores() {
#ifdef __linux__
  cpu_set_t set;  // has room for 1,024
  if (::sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  return 0;
}

void set_default(const char* name, const char* value) { ::setenv(name, value, 0); }

void* allocate(std::size_t alignment, std::size_t bytes) { return std::aligned_alloc(alignment, bytes); }

void release(void* memory) { std::free(memory); }

void* open_library(const std::string& name, std::string& why) {
  void* library = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* said = library ? nullptr : ::dlerror();
  if (said) why = said;
  return library;
}

void* symbol(void* library, const char* name) { return ::dlsym(library, name); }

#endif

}  // namespace tformer::system
