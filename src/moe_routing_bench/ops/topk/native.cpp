// topk: the K best scores of a row, highest first, of equal ones the lower id; NaN before every number, as torch sorts.
// A vector holds one expert's keys of W tokens, one token per lane. Experts come in the order of their ids, and each is
// inserted among the K best so far, in all lanes at once: no branches, and E * K steps for W tokens.

#include "../numbers.h"
#include "../threads.h"

#include <utility>

namespace {

using Ints = int32_t __attribute__((vector_size(sizeof(Vec))));
constexpr int64_t MOST = 16;    // choices; native.py refuses more
constexpr int64_t CHUNK = 64;   // experts whose keys are computed at once
constexpr int64_t SCANNED = 3;  // this many tokens are faster one by one than in a vector
constexpr int32_t NONE = INT32_MIN;  // below the key of every score

// integers that sort like the numbers: -0 is 0, and NaN is above infinity
Ints keys_of(Vec v) {
    const Ints bits = reinterpret_cast<Ints>(v + zero());
    return v == v ? bits ^ (bits >> 31 & INT32_MAX) : Ints{} + INT32_MAX;
}

template <Kind kind>
Ints keys_at(const typename Numbers<kind>::In* row, int64_t left) {
    return keys_of(left >= W ? Numbers<kind>::get(row) : get_some<kind>(row, left));
}

// the lanes of a and b in turn, from the first of each or from the middle
template <int64_t from, size_t... i>
Ints interleaved(Ints a, Ints b, std::index_sequence<i...>) {
    return __builtin_shuffle(a, b, Ints{int32_t(from + i / 2 + i % 2 * W)...});
}

// each round interleaves the first half of the rows with the second; log2(W) of them transpose
void transpose(Ints* row) {
    Ints other[W];
    for (int64_t size = 1; size < W; size *= 2) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < W / 2; i++) {
            other[2 * i] = interleaved<0>(row[i], row[i + W / 2], std::make_index_sequence<W>());
            other[2 * i + 1] = interleaved<W / 2>(row[i], row[i + W / 2], std::make_index_sequence<W>());
        }
        std::copy(other, other + W, row);
    }
}

struct Best {
    Ints key[MOST], id[MOST];
};

template <int K>
void insert(Best& best, const Ints* key_n, int32_t first, int64_t n) {
    Ints key[K], id[K];
    std::copy(best.key, best.key + K, key);
    std::copy(best.id, best.id + K, id);
    for (int64_t i = 0; i < n; i++) {
        const Ints x = key_n[i], e = Ints{} + int32_t(first + i);
        // entries below x move down by one, and the last is removed
#pragma GCC unroll 16
        for (int j = K - 1; j > 0; j--) {
            id[j] = x > key[j - 1] ? id[j - 1] : x > key[j] ? e : id[j];
            key[j] = x > key[j - 1] ? key[j - 1] : x > key[j] ? x : key[j];
        }
        id[0] = x > key[0] ? e : id[0];
        key[0] = x > key[0] ? x : key[0];
    }
    std::copy(key, key + K, best.key);
    std::copy(id, id + K, best.id);
}

using Insert = void (*)(Best&, const Ints*, int32_t, int64_t);
template <int... k>
Insert insert_for(int64_t K, std::integer_sequence<int, k...>) {
    constexpr Insert table[] = {insert<k + 1>...};
    return table[K - 1];
}

template <typename In>
void write(const In* row, const int32_t* id, int64_t step, int64_t K, In* value_K, int64_t* expert_K) {
    for (int64_t k = 0; k < K; k++) {
        expert_K[k] = id[k * step];
        value_K[k] = row[id[k * step]];
    }
}

// n <= W tokens
template <Kind kind>
void select(const typename Numbers<kind>::In* score, int64_t stride, int64_t n, int64_t E, int64_t K, Insert insert,
            typename Numbers<kind>::In* value_TK, int64_t* expert_TK) {
    Best best;
    std::fill(best.key, best.key + K, Ints{} + NONE);
    for (int64_t first = 0; first < E; first += CHUNK) {
        Ints key_n[CHUNK];
        const int64_t here = std::min(CHUNK, E - first);
        for (int64_t e = 0; e < here; e += W) {
            for (int64_t i = 0; i < W; i++)
                key_n[e + i] = keys_at<kind>(score + std::min(i, n - 1) * stride + first + e, here - e);
            transpose(key_n + e);
        }
        insert(best, key_n, int32_t(first), here);
    }
    const auto* id = reinterpret_cast<const int32_t*>(best.id);
    for (int64_t i = 0; i < n; i++) write(score + i * stride, id + i, W, K, value_TK + i * K, expert_TK + i * K);
}

template <Kind kind>
void scan(const typename Numbers<kind>::In* row, int64_t E, int64_t K, typename Numbers<kind>::In* value_K,
          int64_t* expert_K) {
    int32_t key[MOST], id[MOST], of[W];
    std::fill(key, key + K, NONE);
    for (int64_t first = 0; first < E; first += W) {
        const Ints keys = keys_at<kind>(row + first, E - first);
        std::memcpy(of, &keys, sizeof(keys));
        for (int64_t i = 0; i < std::min(W, E - first); i++) {
            if (of[i] <= key[K - 1]) continue;
            int64_t j = K - 1;
            for (; j > 0 && of[i] > key[j - 1]; j--) key[j] = key[j - 1], id[j] = id[j - 1];
            key[j] = of[i], id[j] = int32_t(first + i);
        }
    }
    write(row, id, 1, K, value_K, expert_K);
}

struct Problem {
    const void* score_TE;
    int64_t stride, kind, T, E, K, threads;
    void* value_TK;
    int64_t* expert_TK;
};

template <Kind kind>
void topk(const Problem& p) {
    using In = typename Numbers<kind>::In;
    const auto* score_TE = static_cast<const In*>(p.score_TE);
    auto* value_TK = static_cast<In*>(p.value_TK);
    const Insert insert = insert_for(p.K, std::make_integer_sequence<int, MOST>());
    shared_out(p.T, 4 * W, p.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t += W) {
            const int64_t n = std::min(W, end - t);
            if (n > SCANNED)
                select<kind>(score_TE + t * p.stride, p.stride, n, p.E, p.K, insert, value_TK + t * p.K,
                             p.expert_TK + t * p.K);
            else
                for (int64_t i = t; i < t + n; i++)
                    scan<kind>(score_TE + i * p.stride, p.E, p.K, value_TK + i * p.K, p.expert_TK + i * p.K);
        }
    });
}

}  // namespace

// The stride is in numbers; the results have no gaps.
extern "C" int mrb_topk(const Problem* p) {
    (p->kind == FLOAT32 ? topk<FLOAT32> : p->kind == BFLOAT16 ? topk<BFLOAT16> : topk<FLOAT16>)(*p);
    return 0;
}
