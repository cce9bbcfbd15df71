// Calls of kernels by name, through the list that kernels/operator.h builds and kernels/build.py reads for Python.
#pragma once

#include <string_view>

#include "../../../kernels/operator.h"
#include "tensor.h"

extern "C" [[gnu::visibility("default")]] const Exported *first_exported();

// Calls a kernel by name. Raises Refused if there is none with these argument types. A reference parameter takes a
// pointer, as in ctypes.
template <class... Arguments> void call_kernel(std::string_view name, Arguments... arguments) {
  static constexpr char TYPES[] = {'v', letter<Arguments>()..., '\0'};
  for (const Exported *kernel = first_exported(); kernel; kernel = kernel->next)
    if (kernel->name == name && std::string_view(kernel->types) == TYPES) return reinterpret_cast<void (*)(Arguments...)>(kernel->address)(arguments...);
  throw Refused("the kernel library has no " + std::string(name) + " with these arguments: run make runner");
}
