// All that the headers of TensorRT need of the CUDA toolkit: handles that are passed on.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
