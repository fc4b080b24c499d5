// Several NUMA nodes: each owns a contiguous share of the panels of every matrix of every expert, and threads take
// tasks of their own node first. A task gives the same result on every thread, so no bit of a result depends on this.
//
// A thread whose node has no task left helps the next node, because a node may have no thread, a thread may be slow, and
// all wait at the end of the loop. It then reads over the link, as happens for half of all reads without nodes.
#pragma once
#include <omp.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

struct Taken {  // mirrored in nodes.py: one task, for tests
  int64_t loop, thread, home, node, item, begin, end, cpu;  // home: the thread's node; node: that of the panels
};

struct Nodes {  // also mirrored
  int64_t count, pinned;
  const int64_t *memory, *first_N1, *cpus;  // memory: the system's number, -1: unknown; first_N1: places in cpus
  int64_t refused;                          // the system's last reason not to pin a thread
  Taken* log;                               // may be null
  int64_t room, taken;
};

static inline int64_t share_begin(int64_t panels, int64_t node, int64_t nodes) { return panels * node / nodes; }

struct OnNode {  // the node of a thread; a pinned thread stays there while this object exists
  int64_t node = 0;
  explicit OnNode(Nodes* nodes) {
    if (nodes) settle(*nodes);
  }
  ~OnNode() {
    if (moved) sched_setaffinity(0, sizeof before, &before);
  }
  OnNode(const OnNode&) = delete;

 private:
  cpu_set_t before;
  bool moved = false;

  __attribute__((noinline)) void settle(Nodes& nodes) {
    const int64_t *first = nodes.first_N1, *last = first + nodes.count, *cpus = nodes.cpus;
    auto node_at = [&](int64_t i) { return std::upper_bound(first, last, i) - first - 1; };
    node = node_at(omp_get_thread_num() * *last / omp_get_num_threads());  // as many threads as it has processors
    if (nodes.pinned) {
      cpu_set_t wanted;
      CPU_ZERO(&wanted);
      for (int64_t i = first[node]; i < first[node + 1]; i++) CPU_SET(cpus[i], &wanted);
      moved = !sched_getaffinity(0, sizeof before, &before);
      CPU_AND(&wanted, &wanted, &before);  // only allowed processors; for an empty set the system returns EINVAL
      moved = moved && !sched_setaffinity(0, sizeof wanted, &wanted);
      if (moved) return;
      __atomic_store_n(&nodes.refused, errno, __ATOMIC_RELAXED);
    }
    const int64_t* here = std::find(cpus, cpus + *last, (int64_t)sched_getcpu());
    if (here < cpus + *last) node = node_at(here - cpus);
  }
};

struct alignas(64) NextTask {
  std::atomic<int64_t> task{0};
};

// Loop number `loop` of this parallel region: calls task(i, begin, end) once for every i < items and each strip of
// panels, on any thread, and ends with a barrier. Counters are used once, so they need no reset.
template <class Task>
__attribute__((noinline)) static void by_node(Nodes& nodes, std::vector<NextTask>& counters, int64_t loop, int64_t home,
                                              int64_t items, int64_t panels, int64_t wide, Task task) {
  for (int64_t k = 0; k < nodes.count; k++) {
    const int64_t node = (home + k) % nodes.count;
    const int64_t from = share_begin(panels, node, nodes.count), to = share_begin(panels, node + 1, nodes.count);
    const int64_t strips = (to - from + wide - 1) / wide;
    std::atomic<int64_t>& next = counters[loop * nodes.count + node].task;
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items * strips;) {
      const int64_t begin = from + i % strips * wide, end = std::min(begin + wide, to);
      if (nodes.log) {
        const int64_t at = __atomic_fetch_add(&nodes.taken, 1, __ATOMIC_RELAXED);
        if (at < nodes.room)
          nodes.log[at] = {loop, omp_get_thread_num(), home, node, i / strips, begin, end, sched_getcpu()};
      }
      task(i / strips, begin, end);
    }
  }
#pragma omp barrier
}

// Copies the panels of E experts to new memory, each node's share to its own memory. Returns 0 or the system's error.
// elsewhere: how many shares are on another node, checked by the page in their middle.
//
// A new page comes from the node that the writing thread prefers. Binding the memory itself (mbind) would need a mapping
// for each expert and node, and a process may have only 65,530 mappings.
extern "C" int mrb_copy_by_node(char* to, const char* from, int64_t E, int64_t panels, int64_t panel_bytes,
                                const Nodes* nodes, int64_t* elsewhere) {
  enum { DEFAULT_BITS = 1024, PREFERRED = 1 };  // MPOL_PREFERRED
  const int64_t page = sysconf(_SC_PAGESIZE), expert_bytes = panels * panel_bytes;
  unsigned long before[DEFAULT_BITS / 64] = {};
  int policy = 0, failed = 0;
  std::vector<void*> middle;
  std::vector<int64_t> wanted;
  if (syscall(SYS_get_mempolicy, &policy, before, DEFAULT_BITS, nullptr, 0)) return errno;
  for (int64_t node = 0; node < nodes->count && !failed; node++) {
    const int64_t begin = share_begin(panels, node, nodes->count) * panel_bytes;
    const int64_t size = share_begin(panels, node + 1, nodes->count) * panel_bytes - begin, memory = nodes->memory[node];
    unsigned long mask[DEFAULT_BITS / 64] = {};
    if (memory >= 0) mask[memory / 64] = 1ul << memory % 64;
    if (memory >= 0 && syscall(SYS_set_mempolicy, PREFERRED, mask, DEFAULT_BITS)) failed = errno;
    for (int64_t e = 0; e < E && !failed; e++) {
      char* share = to + e * expert_bytes + begin;
      memcpy(share, from + (share - to), size);
      if (memory < 0 || size < 2 * page) continue;
      middle.push_back((void*)((uintptr_t)(share + size / 2) & -page)), wanted.push_back(memory);
    }
    if (syscall(SYS_set_mempolicy, policy, before, DEFAULT_BITS) && !failed) failed = errno;
  }
  std::vector<int> lies(middle.size(), -1);
  if (!failed && !middle.empty() && syscall(SYS_move_pages, 0, middle.size(), middle.data(), nullptr, lies.data(), 0))
    failed = errno;
  *elsewhere = 0;
  for (size_t i = 0; i < lies.size(); i++) *elsewhere += lies[i] != wanted[i];
  return failed;
}
