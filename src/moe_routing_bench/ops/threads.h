// Work shared by threads: a free thread takes the next items. A single thread does not call OpenMP, which takes 1 us.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>

namespace {

// calls body(begin, end) for all of 0 .. n, in pieces of `share` items; with one thread, once for everything
template <typename Body>
void shared_out(int64_t n, int64_t share, int64_t threads, Body body) {
    if (threads <= 1) return body(int64_t(0), n);
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
    for (int64_t begin; (begin = next.fetch_add(share, std::memory_order_relaxed)) < n;)
        body(begin, std::min(n, begin + share));
}

// how many of n items a thread takes at once: at most `most`, fewer if some thread could not come four times
inline int64_t fair_share(int64_t n, int64_t most, int64_t threads) {
    return std::clamp<int64_t>(n / (4 * std::max<int64_t>(1, threads)), 1, most);
}

}  // namespace
