// A pool of threads that share one call's work. Which thread computes a chunk never shows in a result.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

// Calls work(context, chunk) once for every chunk of 0 .. num_chunks - 1, on the calling thread and the pool's; returns when all are done.
// Several threads may call it: one call's work follows the other's. Not from within work.
void run_chunks(int64_t num_chunks, void (*work)(void *, int64_t), void *context);

template <class Work> void parallel_for(int64_t num_chunks, Work &&work) {
  using Body = std::remove_reference_t<Work>;
  run_chunks(num_chunks, [](void *body, int64_t chunk) { (*static_cast<Body *>(body))(chunk); }, &work);
}

// The same for several jobs in one go, work(job, chunk); starts[job] is the number of chunks of all jobs before it, and starts ends with
// that of all.
template <class Work> void parallel_for_each(const std::vector<int64_t> &starts, Work &&work) {
  parallel_for(starts.back(), [&](int64_t chunk) {
    const int64_t job = std::upper_bound(starts.begin(), starts.end(), chunk) - starts.begin() - 1;
    work(job, chunk - starts[job]);
  });
}

// Rows that make a chunk, where `enough` channels are worth another thread.
inline int64_t rows_of_chunk(int64_t enough, int64_t channels) { return std::max<int64_t>(enough / std::max<int64_t>(channels, 1), 1); }

// Threads that share a call's work, with the calling one. At first: as many as the process may use physical cores.
void set_threads(int32_t num_threads);
int32_t get_threads();
