// What the simulated TensorRT needs of the simulated driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

struct CUstream_st;

/// Ends the process: a real GPU would have done anything.
[[noreturn]] void simulated_fault(const std::string& what);
void simulated_give(CUstream_st* stream, std::function<void()> work);
bool simulated_on_device(const void* address, std::size_t size);
/// Whether this thread has a context.
bool simulated_has_context();
