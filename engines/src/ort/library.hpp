// ONNX Runtime, loaded at run time and set up: every file that uses it includes it by this header.
#pragma once

#ifndef ORT_API_MANUAL_INIT
#error "compile with ORT_API_MANUAL_INIT: the library is loaded by dlopen"
#endif
#include <onnxruntime_cxx_api.h>

#include <filesystem>
#include <string>
#include <string_view>

namespace tformer {

/// Load the library, once for the process: a file or the folder that has it. Where that is empty, what the environment
/// variable TFORMER_ONNXRUNTIME names, or what the loader finds. Throws Error.
void load_onnxruntime(const std::string& place);

/// The version that is loaded, such as 1.31.1.
const std::string& onnxruntime_version();

/// The environment of all sessions; it is never destroyed.
Ort::Env& ort_env();

/// What the library says, on one line of at most 300 characters, without the places of its source.
std::string reason(const std::string& said);

/// Whether the processor sums products of bytes in 32 bits.
bool has_vnni();

/// Throws Error for a graph that branches or loops, which need not end, std::invalid_argument for what is no graph.
void require_no_control_flow(const std::filesystem::path& graph);
/// The same for a file's content; `name` is for the message.
void require_no_control_flow(std::string_view content, const std::string& name);

}  // namespace tformer
