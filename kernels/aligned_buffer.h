// Buffers that a thread reuses from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

constexpr int64_t ALIGNMENT = 64;

template <class Number> Number *aligned(Number *at) {
  return reinterpret_cast<Number *>((reinterpret_cast<uintptr_t>(at) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
}

// Returns the address of `count` numbers in `memory`, aligned to 64 bytes, with 64 readable bytes after them. `memory`
// grows if necessary.
template <class Number> Number *aligned_buffer(std::vector<Number> &memory, int64_t count) {
  const size_t with_margin = count + 2 * ALIGNMENT / sizeof(Number);
  if (memory.size() < with_margin) memory.resize(with_margin);
  return aligned(memory.data());
}
