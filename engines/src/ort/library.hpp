// Loads ONNX Runtime at run time. Every file that uses it includes this header instead of its own.
#pragma once

#ifndef ORT_API_MANUAL_INIT
#error "compile with ORT_API_MANUAL_INIT: the library is loaded by dlopen"
#endif
#include <onnxruntime_cxx_api.h>
#include <onnxruntime_session_options_config_keys.h>

#include <filesystem>
#include <string>
#include <string_view>

namespace tformer {

/// Load the library, once for the process: a file or the folder that has it. Where that is empty, what the environment
/// variable TFORMER_ONNXRUNTIME names, or what the loader finds. Throws Error.
void load_onnxruntime(const std::string& place);

/// The version that is loaded, such as 1.31.1.
const std::string& onnxruntime_version();

/// The environment of all sessions, never destroyed.
Ort::Env& ort_env();

/// The library's message on one line of at most 300 characters, without source locations.
std::string reason(const std::string& said);

/// Whether the processor has VNNI: 8-bit products summed in 32 bits, without saturation.
bool has_vnni();

/// Throws Error for a graph with branches or loops, which may never end, std::invalid_argument for what is no graph;
/// `name` is for messages.
void require_no_control_flow(std::string_view content, const std::string& name);

}  // namespace tformer
