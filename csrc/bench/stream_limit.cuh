// Its launcher.
#pragma once

#include <cuda_runtime_api.h>

#include "stream_limit.h"

namespace zero1 {

cudaError_t launch_stream_limit(const StreamLimitArgs& args, cudaStream_t stream);

}  // namespace zero1
