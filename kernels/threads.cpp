// The thread pool. Each thread has a range of chunks. A thread that has finished its range takes chunks from other
// ranges (work stealing), for example if a core is busy with another process. The caller waits only for threads that
// hold a chunk, never for a thread that is not scheduled. A barrier of all threads, as in GOMP, takes 10 times as long
// if a thread is not scheduled.
#include "threads.h"

#include "operator.h"

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <immintrin.h>
#include <linux/futex.h>
#include <map>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

// Waking a sleeping thread costs several microseconds on both sides. A decode step would pay this 200 times.
constexpr auto SPIN = std::chrono::microseconds(200);
constexpr uint32_t CLOSED = 1u << 31;

// Waits until `value` is not `old`: spins for SPIN, then sleeps. A thread that changes `value` must call wake if
// `sleepers` is not 0.
void wait_while(std::atomic<uint32_t> &value, uint32_t old, std::atomic<uint32_t> &sleepers) {
  const auto end = std::chrono::steady_clock::now() + SPIN;
  do
    for (int i = 0; i < 32; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      _mm_pause();
    }
  while (std::chrono::steady_clock::now() < end);
  sleepers.fetch_add(1);
  while (value.load() == old) syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  sleepers.fetch_sub(1);
}

void wake(std::atomic<uint32_t> &value, std::atomic<uint32_t> &sleepers) {
  if (sleepers.load() != 0) syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
}

// The physical cores that this process may run on, each represented by its first hardware thread.
struct Cores {
  std::vector<int> all;
  int of[CPU_SETSIZE];  // hardware thread -> core

  Cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) of[cpu] = -1;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &allowed) && of[cpu] < 0) {
        all.push_back(cpu);
        of[cpu] = cpu;
        claim_siblings(cpu);
      }
    if (all.empty()) all.push_back(of[0] = 0);  // sched_getaffinity fails on a machine for more than CPU_SETSIZE threads
  }

  // thread_siblings_list has the form "0-1" or "0,64".
  void claim_siblings(int core) {
    char path[96];
    std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", core);
    std::FILE *file = std::fopen(path, "r");
    if (!file) return;
    for (int first = 0, last = 0; std::fscanf(file, "%d", &first) == 1;) {
      if (std::fscanf(file, "-%d", &last) != 1) last = first;
      for (int sibling = first; sibling <= last && sibling < CPU_SETSIZE; ++sibling) of[sibling] = core;
      if (std::fgetc(file) != ',') break;
    }
    std::fclose(file);
  }

  int here() const {
    const int cpu = sched_getcpu();
    return cpu < 0 || cpu >= CPU_SETSIZE ? -1 : of[cpu];
  }
};

const Cores *process_cores = new Cores;  // never destroyed, like the pools

const Cores &cores() { return *process_cores; }

// The chunks of one thread. They are consecutive, so that the thread reads memory in one direction, and the same weights
// in every step. The thread takes chunks from the front; other threads take chunks from the back.
struct alignas(64) ChunkRange {
  std::atomic<uint64_t> remaining{0};  // first chunk in the upper half, end in the lower half

  void begin(uint64_t first, uint64_t end) { remaining.store(first << 32 | end, std::memory_order_relaxed); }

  // Returns -1 if no chunk is left.
  int64_t take(bool back) {
    uint64_t now = remaining.load(std::memory_order_relaxed);
    while (now >> 32 != (now & UINT32_MAX))
      if (remaining.compare_exchange_weak(now, back ? now - 1 : now + (uint64_t{1} << 32), std::memory_order_relaxed))
        return static_cast<int64_t>(back ? (now & UINT32_MAX) - 1 : now >> 32);
    return -1;
  }
};

// The memory that the next calls read. A thread may see parts of two versions, which costs useless fetches only.
struct Expected {
  std::atomic<int64_t> num_ranges{0};
  std::atomic<const char *> begin[MAX_EXPECTED];
  std::atomic<int64_t> num_bytes[MAX_EXPECTED];
};
alignas(64) Expected expected;

// Fetches one thread's parts of the expected memory. Memory is idle while one thread computes a norm or attention:
// decode steps of 135 M parameters take 0.94 to 0.96 of the time (int8, int4), 0.985 (12-bit bfloat16).
class Fetcher {
 public:
  Fetcher(int thread, int num_threads) : thread_(thread), num_threads_(num_threads) {}

  // Returns when the parts are fetched, or when `call` is no longer `seen`.
  void fetch(const std::atomic<uint32_t> &call, uint32_t seen) {
    const int64_t num_ranges = expected.num_ranges.load(std::memory_order_relaxed);
    int64_t remaining = MAX_BYTES;
    for (int64_t i = 0; i < num_ranges; ++i) {
      const char *begin = expected.begin[i].load(std::memory_order_relaxed);
      const int64_t num_bytes = expected.num_bytes[i].load(std::memory_order_relaxed);
      const char *from = begin + num_bytes * thread_ / num_threads_, *end = begin + num_bytes * (thread_ + 1) / num_threads_;
      if (i == 0 && begin != first_) first_ = begin, fetched_ = from;
      if (i == 0) from = fetched_;  // the same range was expected before an earlier call
      for (; from < end && remaining > 0; from += STRIDE, remaining -= STRIDE) {
        if (call.load(std::memory_order_relaxed) != seen) return;
        for (int64_t byte = 0; byte < STRIDE; byte += LINE) _mm_prefetch(from + byte, _MM_HINT_T1);
        if (i == 0) fetched_ = from + STRIDE;
      }
    }
  }

 private:
  static constexpr int64_t LINE = 64, STRIDE = 8 * LINE;
  static constexpr int64_t MAX_BYTES = 1 << 18;  // half of the smallest second-level cache; 2^19 gains nothing
  const int thread_, num_threads_;
  const char *first_ = nullptr, *fetched_ = nullptr;  // the first range, and the next byte of it to fetch
};

struct Pool {
  const int num_threads;  // including the calling thread
  std::mutex call_mutex;
  std::vector<pthread_t> workers;
  std::vector<int> worker_cores;  // the core of each pinned worker; workers beyond the number of cores are not pinned

  void (*work)(void *, int64_t) = nullptr;
  void *context = nullptr;
  std::vector<ChunkRange> ranges;  // chunks of the call, one range per thread
  std::atomic<int> num_serving{0};
  alignas(64) std::atomic<uint32_t> call{0};      // number of calls; a worker waits for the next call
  alignas(64) std::atomic<uint32_t> gate{CLOSED};  // number of workers inside a call; CLOSED: the call accepts no more workers
  std::atomic<uint32_t> sleeping_workers{0}, sleeping_callers{0};

  explicit Pool(int threads) : num_threads(threads), ranges(threads) {}

  void claim_chunks(int thread) {
    for (int i = 0; i < num_threads; ++i) {
      ChunkRange &range = ranges[(thread + i) % num_threads];
      for (int64_t chunk; (chunk = range.take(i > 0)) >= 0;) work(context, chunk);
    }
  }

  void serve() {
    const int thread = ++num_serving;
    Fetcher fetcher(thread, num_threads);
    for (uint32_t seen = 0;;) {
      fetcher.fetch(call, seen);
      wait_while(call, seen, sleeping_workers);
      seen = call.load(std::memory_order_acquire);
      if (!(gate.fetch_add(1) & CLOSED)) claim_chunks(thread);
      gate.fetch_sub(1);
      wake(gate, sleeping_callers);
    }
  }

  // The calling thread is not pinned, because threads that it starts later would inherit the pinning. Instead workers
  // move away from its core.
  void move_workers() {
    const int here = cores().here();
    for (size_t i = 0; i < worker_cores.size(); ++i)
      if (worker_cores[i] == here) pin(i, spare_core(here));
  }

  int spare_core(int here) const {
    for (int core : cores().all) {
      bool used = core == here;
      for (int worker_core : worker_cores) used = used || worker_core == core;
      if (!used) return core;
    }
    return here;
  }

  void pin(size_t worker, int core) {
    worker_cores[worker] = core;
    cpu_set_t core_set;
    CPU_ZERO(&core_set);
    CPU_SET(core, &core_set);
    pthread_setaffinity_np(workers[worker], sizeof core_set, &core_set);
  }

  void start_workers() {
    if (static_cast<int>(workers.size()) >= num_threads - 1) return;
    const int here = cores().here();
    sigset_t all, before;  // signals are for the caller: Python handles them in its main thread
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (static_cast<int>(workers.size()) < num_threads - 1) {
      pthread_t worker;
      if (pthread_create(&worker, nullptr, [](void *pool) -> void * { return static_cast<Pool *>(pool)->serve(), nullptr; }, this)) break;
      workers.push_back(worker);
      if (workers.size() < cores().all.size()) {
        worker_cores.push_back(-1);
        pin(workers.size() - 1, spare_core(here));
      }
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void run(int64_t chunks, void (*function)(void *, int64_t), void *argument) {
    std::lock_guard lock(call_mutex);
    work = function, context = argument;
    for (int i = 0; i < num_threads; ++i) ranges[i].begin(chunks * i / num_threads, chunks * (i + 1) / num_threads);
    start_workers();
    move_workers();
    gate.fetch_and(~CLOSED);
    call.fetch_add(1);
    wake(call, sleeping_workers);
    claim_chunks(0);
    for (uint32_t inside = gate.fetch_or(CLOSED) | CLOSED; inside != CLOSED; inside = gate.load(std::memory_order_acquire))
      wait_while(gate, inside, sleeping_callers);
  }
};

// One pool for each requested number of threads. A change of the number, for example between prefill and decode, then
// starts and ends no thread.
struct Pools {
  std::mutex pools_mutex;
  std::map<int, Pool *> by_size;  // never destroyed: workers may sleep in them while the process exits

  Pool *of(int num_threads) {
    std::lock_guard lock(pools_mutex);
    Pool *&pool = by_size[num_threads];
    return pool ? pool : pool = new Pool(num_threads);
  }
};

Pools *pools = new Pools;
std::atomic<Pool *> pool = pools->of(static_cast<int>(cores().all.size()));

// A forked process has no workers, and its locks may be held by threads of the parent process.
const int at_fork = pthread_atfork(nullptr, nullptr, [] {
  const int num_threads = pool.load()->num_threads;
  pools = new Pools;
  pool = pools->of(num_threads);
});

// Rereads the cores after the process's CPU affinity has changed, and creates a new pool with one thread per core.
void read_cores() {
  process_cores = new Cores;
  pools = new Pools;
  pool = pools->of(static_cast<int>(cores().all.size()));
}

EXPORT(read_cores);

}  // namespace

void run_chunks(int64_t num_chunks, void (*work)(void *, int64_t), void *context) {
  Pool *const current = pool;
  if (num_chunks <= 1 || current->num_threads == 1)
    for (int64_t chunk = 0; chunk < num_chunks; ++chunk) work(context, chunk);
  else
    current->run(num_chunks, work, context);
}

void expect_reads(const MemoryRange *ranges, int64_t num_ranges) {
  num_ranges = std::min(num_ranges, MAX_EXPECTED);
  for (int64_t i = 0; i < num_ranges; ++i) {
    expected.begin[i].store(ranges[i].begin, std::memory_order_relaxed);
    expected.num_bytes[i].store(ranges[i].num_bytes, std::memory_order_relaxed);
  }
  expected.num_ranges.store(num_ranges, std::memory_order_relaxed);
}

void set_threads(int32_t num_threads) { pool = pools->of(num_threads); }

int32_t get_threads() { return pool.load()->num_threads; }

EXPORT(run_chunks);
EXPORT(set_threads);
EXPORT(get_threads);
