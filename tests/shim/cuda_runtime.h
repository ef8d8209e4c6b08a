// Stands before CUDA's own on the include path.
#pragma once

#include "host_shim.h"
