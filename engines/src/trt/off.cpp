// Built instead of the other files of this folder where CMake has no TensorRT_ROOT.
#include "errors.hpp"
#include "trt/open.hpp"

namespace tformer {

std::shared_ptr<const Backend> open_plans(std::shared_ptr<const Bundle>, const OpenOptions&) {
  throw Error(Status::missing,
              "backend trt: this libtformer was built without TensorRT: build it with -DTensorRT_ROOT=FOLDER, or use "
              "backend ort");
}

std::string tensorrt_headers() { return ""; }

}  // namespace tformer
