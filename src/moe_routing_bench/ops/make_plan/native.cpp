// make_plan: counts each expert's pairs, sums the spans, then assigns rows in (token, choice) order.
// Each thread counts its own range of pairs. A prefix sum over (expert, thread) gives it the rows that it may assign, so
// the order is that of the pairs and threads share nothing.

#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>

struct Problem {
    const int64_t* expert_P;
    int64_t P, E, capacity, block_rows, R, threads;  // capacity < 0: spans are loads rounded up to block_rows
    int64_t *row_P, *pair_R, *offset_E1, *count_E, *dropped_E;
};

// Returns 0, or 1 if there is no memory, or 2 if the spans need more than R rows.
extern "C" int mrb_make_plan(const Problem* problem) {
    const auto& s = *problem;
    const int64_t *expert_P = s.expert_P, P = s.P, E = s.E, capacity = s.capacity, block_rows = s.block_rows, R = s.R;
    int64_t *row_P = s.row_P, *pair_R = s.pair_R, *offset_E1 = s.offset_E1, *count_E = s.count_E;
    int64_t *dropped_E = s.dropped_E, threads = s.threads;
    // next_WE[w * E + e]: first the pairs of expert e in thread w's range, then the next row it assigns
    auto* next_WE = static_cast<int64_t*>(std::calloc(std::max<int64_t>(threads * E, 1), sizeof(int64_t)));
    if (next_WE == nullptr) return 1;
    const int64_t run = (P + threads - 1) / threads;
    int wrong = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        // a nested region may get fewer threads than requested, so each takes every n-th range
        const int64_t here = omp_get_thread_num(), present = omp_get_num_threads();
        for (int64_t w = here; w < threads; w += present) {
            int64_t* next_E = next_WE + w * E;
            for (int64_t p = w * run; p < std::min(P, (w + 1) * run); p++)
                if (uint64_t(expert_P[p]) < uint64_t(E)) next_E[expert_P[p]]++;
        }
#pragma omp barrier
#pragma omp single
        {
            int64_t row = 0;
            for (int64_t e = 0; e < E; e++) {
                int64_t load = 0;
                for (int64_t w = 0; w < threads; w++) {
                    const int64_t count = next_WE[w * E + e];
                    next_WE[w * E + e] = row + load;
                    load += count;
                }
                offset_E1[e] = row;
                count_E[e] = capacity < 0 ? load : std::min(load, capacity);
                dropped_E[e] = load - count_E[e];
                row += capacity < 0 ? (load + block_rows - 1) / block_rows * block_rows : capacity;
            }
            offset_E1[E] = row;
            wrong = row > R ? 2 : 0;
        }
        if (!wrong) {
            for (int64_t w = here; w < threads; w += present) {
                int64_t* next_E = next_WE + w * E;
                for (int64_t p = w * run; p < std::min(P, (w + 1) * run); p++) {
                    const int64_t e = expert_P[p];
                    row_P[p] = -1;
                    if (uint64_t(e) >= uint64_t(E)) continue;
                    const int64_t row = next_E[e]++;
                    if (capacity >= 0 && row >= offset_E1[e + 1]) continue;
                    row_P[p] = row;
                    pair_R[row] = p;
                    // writes alternate between E places, so the processor cannot prefetch: fetch the line after the next
                    __builtin_prefetch(pair_R + std::min(row + 16, R - 1), 1);
                }
            }
#pragma omp for schedule(static)
            for (int64_t e = 0; e < E; e++)
                std::fill(pair_R + offset_E1[e] + count_E[e], pair_R + offset_E1[e + 1], int64_t(-1));
        }
    }
    if (!wrong) std::fill(pair_R + offset_E1[E], pair_R + R, int64_t(-1));
    std::free(next_WE);
    return wrong;
}
