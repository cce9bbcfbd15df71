// Calls of the library that are recorded, to be made again all in one: Python takes longer to make 200 calls than a small model to compute.
#pragma once

#include <functional>
#include <vector>

using Recording = std::vector<std::function<void()>>;

extern thread_local Recording *recording;  // of this thread; null while nothing is recorded

// The first line of every function that Python calls, or of the one that it hands its arguments to. `call` makes the same call again; what
// its arguments point to must stay.
template <class Call> void record(Call call) {
  if (recording) recording->emplace_back(call);
}
