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
  for (const Exported *each = first_exported(); each; each = each->next)
    if (each->name == name && std::string_view(each->types) == TYPES) return reinterpret_cast<void (*)(Arguments...)>(each->address)(arguments...);
  throw Refused("the kernels have no " + std::string(name) + " of these arguments: run make runner");
}
