// attention: y = softmax(q k^T / sqrt(A)) v, in blocks of keys with a running maximum and sum.
// Many queries: keys (transposed) and values of a head are packed to float32 once, and blocks of ROWS queries go over
// them. Few queries share what is read: keys and values are read where they are, and a long sequence is split.

#include "../numbers.h"
#include "../threads.h"

#include <cmath>
#include <limits>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace {

using Ints = int32_t __attribute__((vector_size(sizeof(Vec))));
constexpr int64_t KEYS = 64;       // of a panel of packed keys, and of a block for few queries
constexpr int64_t BLOCK = 128;     // keys of a block for many queries
constexpr int64_t ROWS = 24;       // queries of a block: a multiple of the rows of every tile
constexpr int64_t FEW = 8;         // so many queries of a head or less read keys where they are
constexpr int64_t SPLIT = 256;     // a part of a split sequence has at least so many keys
constexpr int64_t LINE = 64;
constexpr int64_t AHEAD = 8192;    // bytes that few queries fetch ahead: 2 to 12 % faster than 4096 and 16384
#if defined __AVX2__ && !defined __AVX512F__
constexpr int64_t VECTORS = 2, SUMS = 12;  // of a tile; 16 registers
#else
constexpr int64_t VECTORS = 4, SUMS = 24;  // 32 registers
#endif
constexpr float NOTHING = -std::numeric_limits<float>::infinity();

struct Problem {
    const void *q, *k, *v;
    const float *cosine, *sine;  // of each position and pair of numbers; null: nothing is turned
    void* y;
    int64_t qb, qh, qn, kb, kj, km, vb, vj, vm;  // strides
    int64_t kind, B, H, J, N, M, A;
    double scale;
    int64_t causal, window, threads;
};

// b if one of them is not a number
Vec most(Vec a, Vec b) {
#if defined __AVX512F__
    return _mm512_max_ps(a, b);
#elif defined __AVX2__
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, within 2 ulp: x = n + r, a polynomial for 2^r; 0 for minus infinity
Vec power(Vec x) {
    const Vec low = same(-150.f), magic = same(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec in = most(low, x);  // what is not a number stays so
    const Vec n = in + magic - magic, r = in - n;
    Vec p = same(1.540353039e-4f);
    p = fma(p, r, same(1.333355815e-3f));
    p = fma(p, r, same(9.618129108e-3f));
    p = fma(p, r, same(5.550410867e-2f));
    p = fma(p, r, same(2.402265070e-1f));
    p = fma(p, r, same(6.931471806e-1f));
    p = fma(p, r, same(1.f));
#ifdef __AVX512F__
    return _mm512_scalef_ps(p, n);
#else
    const Ints bits = (__builtin_convertvector(n, Ints) + 127) << 23;
    return x < same(-126.f) ? zero() : p * reinterpret_cast<Vec>(bits);
#endif
}

// two vectors laid end to end: words that go to the first of both, and to the second, if blocks of s are exchanged
template <int s, size_t... j>
constexpr Ints lower(std::index_sequence<j...>) {
    return Ints{int(j & s ? W + j - s : j)...};
}
template <int s, size_t... j>
constexpr Ints upper(std::index_sequence<j...>) {
    return Ints{int(j & s ? W + j : j + s)...};
}

template <int s = 1>
void transpose(Vec (&v)[W]) {
    if constexpr (s < W) {
        constexpr auto words = std::make_index_sequence<W>();
#pragma GCC unroll 16
        for (int i = 0; i < W; i++)
            if (!(i & s)) {
                const Vec a = v[i], b = v[i | s];
                v[i] = __builtin_shuffle(a, b, lower<s>(words));
                v[i | s] = __builtin_shuffle(a, b, upper<s>(words));
            }
        transpose<2 * s>(v);
    }
}

// word i of the result is the sum of vector i
template <int s = 1>
[[gnu::always_inline]] inline Vec sums_of(Vec (&v)[W]) {
    if constexpr (s == W) {
        return v[0];
    } else {
        constexpr auto words = std::make_index_sequence<W>();
#pragma GCC unroll 16
        for (int i = 0; i < W; i += 2 * s)
            v[i] = __builtin_shuffle(v[i], v[i + s], lower<s>(words)) + __builtin_shuffle(v[i], v[i + s], upper<s>(words));
        return sums_of<2 * s>(v);
    }
}

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// c[R][n vectors] (+)= x[R][depth] times y[depth][n vectors]
template <int n, bool adds>
void tile(const float* x, int64_t ldx, const float* y, int64_t ldy, int64_t depth, float* c, int64_t ldc) {
    constexpr int R = SUMS / n;
    Vec sum[R][n];
#pragma GCC unroll 24
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) sum[i][j] = adds ? load(c + i * ldc + j * W) : zero();
    for (int64_t k = 0; k < depth; k++) {
        Vec row[n];
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) row[j] = load(y + k * ldy + j * W);
#pragma GCC unroll 24
        for (int i = 0; i < R; i++) {
            const Vec one = same(x[i * ldx + k]);
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) sum[i][j] = fma(one, row[j], sum[i][j]);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) store(c + i * ldc + j * W, sum[i][j]);
}

template <bool adds>
void product(const float* x, int64_t ldx, const float* y, int64_t ldy, int64_t depth, float* c, int64_t ldc,
             int64_t rows, int64_t columns) {
    for (int64_t j = 0; j < columns; j += VECTORS * W) {
        const int64_t n = std::min(VECTORS, (columns - j) / W), step = SUMS / n;
        for (int64_t i = 0; i < rows; i += step) {
            const auto go = [&](auto many) {
                tile<many(), adds>(x + i * ldx, ldx, y + j, ldy, depth, c + i * ldc + j, ldc);
            };
            if (n == 1) go(std::integral_constant<int, 1>());
            if (n == 2) go(std::integral_constant<int, 2>());
            if constexpr (VECTORS > 2) {
                if (n == 3) go(std::integral_constant<int, 3>());
                if (n == 4) go(std::integral_constant<int, 4>());
            }
        }
    }
}

// scores are exponents of 2
float scale_of(const Problem& p) { return float(p.scale * 1.4426950408889634); }

// one row of A numbers as float32, turned by the angles of its position
template <Kind kind>
void read_row(const typename Numbers<kind>::In* from, const Problem& p, int64_t position, float factor, float* to) {
    const int64_t A = p.A, C = A / 2;
    int64_t a = 0;
    for (; a + W <= A; a += W) store(to + a, Numbers<kind>::get(from + a) * same(factor));
    if (a < A) put_some<FLOAT32>(to + a, get_some<kind>(from + a, A - a) * same(factor), A - a);
    if (p.cosine == nullptr) return;
    const float *cosine = p.cosine + position * C, *sine = p.sine + position * C;
    for (int64_t c = 0; c < C; c++) {
        const float first = to[c], second = to[c + C];
        to[c] = first * cosine[c] - second * sine[c];
        to[c + C] = second * cosine[c] + first * sine[c];
    }
}

// the keys that the query at a position sees: from first to last
struct Sight {
    int64_t first, last;
};
Sight sight(const Problem& p, int64_t position) {
    int64_t first = 0, last = p.M;
    if (p.window) first = position - p.window + 1, last = position + p.window;
    if (p.causal) last = std::min(last, position + 1);
    return {std::max<int64_t>(first, 0), std::clamp<int64_t>(last, 0, p.M)};
}

// scores of one query become weights; its maximum, sum and result so far are brought to the new maximum
void weigh(float* score, int64_t columns, float& best, float& sum, float* y, int64_t width) {
    Vec high = load(score);
    for (int64_t c = W; c < columns; c += W) high = most(high, load(score + c));
    const float found = max_of(high);
    if (found > best) {
        const float shrink = best == NOTHING ? 0.f : std::exp2(best - found);
        sum *= shrink;
        for (int64_t a = 0; a < width; a += W) store(y + a, load(y + a) * same(shrink));
        best = found;
    }
    if (best == NOTHING && found == found) {  // no key yet
        std::fill(score, score + columns, 0.f);
        return;
    }
    Vec all = zero();
    const Vec most_of_all = same(best);
#pragma GCC unroll 4
    for (int64_t c = 0; c < columns; c += W) {
        const Vec weight = power(load(score + c) - most_of_all);
        store(score + c, weight);
        all = all + weight;
    }
    sum += sum_of(all);
}

template <Kind kind>
void write_row(const float* y, float sum, int64_t A, typename Numbers<kind>::In* to) {
    const Vec f = same(sum > 0 || sum != sum ? 1 / sum : 0.f);
    int64_t a = 0;
    for (; a + W <= A; a += W) Numbers<kind>::put(to + a, load(y + a) * f);
    if (a < A) put_some<kind>(to + a, load(y + a) * f, A - a);
}

// ---- many queries

struct Workspace {
    std::unique_ptr<char[]> memory;
    float *keys, *values;  // [M / KEYS][A][KEYS] and [M][width]
    float *query, *score, *y;  // [ROWS][A], [ROWS][BLOCK], [ROWS][width]

    static int64_t floats(int64_t M, int64_t A, int64_t width) {
        return up(M, BLOCK) * (A + width) + ROWS * (up(A, 16) + BLOCK + width) + LINE;
    }
    bool make(int64_t M, int64_t A, int64_t width) {
        memory.reset(new (std::nothrow) char[floats(M, A, width) * 4]);
        if (!memory) return false;
        float* at = reinterpret_cast<float*>(up(reinterpret_cast<intptr_t>(memory.get()), LINE));
        keys = at, at += up(M, BLOCK) * A;
        values = at, at += up(M, BLOCK) * width;
        score = at, at += ROWS * BLOCK;
        y = at, at += ROWS * width;
        query = at;
        return true;
    }
};

template <Kind kind>
void pack(const Problem& p, const typename Numbers<kind>::In* k, const typename Numbers<kind>::In* v, int64_t width,
          Workspace& w) {
    std::vector<float> rows(W * width);
    for (int64_t first = 0; first < p.M; first += W) {
        if (first + W > p.M) std::fill(rows.begin(), rows.end(), 0.f);
        for (int64_t m = first; m < first + W; m++) {
            float* to = w.values + m * width;
            if (m >= p.M) {
                std::fill(to, to + width, 0.f);
                continue;
            }
            read_row<kind>(k + m * p.km, p, m, 1.f, rows.data() + (m - first) * width);
            for (int64_t a = 0; a < p.A; a += W)
                store(to + a,
                      a + W <= p.A ? Numbers<kind>::get(v + m * p.vm + a) : get_some<kind>(v + m * p.vm + a, p.A - a));
        }
        float* columns = w.keys + first / KEYS * KEYS * p.A + first % KEYS;
        for (int64_t a = 0; a < p.A; a += W) {
            Vec block[W];
#pragma GCC unroll 16
            for (int i = 0; i < W; i++) block[i] = load(rows.data() + i * width + a);
            transpose(block);
            const int64_t some = std::min(W, p.A - a);
            if (some == W) {
#pragma GCC unroll 16
                for (int i = 0; i < W; i++) store(columns + (a + i) * KEYS, block[i]);
            } else {
                for (int64_t i = 0; i < some; i++) store(columns + (a + i) * KEYS, block[i]);
            }
        }
    }
}

template <Kind kind>
void block_of_queries(const Problem& p, const typename Numbers<kind>::In* q, int64_t first, int64_t width, Workspace& w,
                      typename Numbers<kind>::In* y) {
    const int64_t rows = std::min(ROWS, p.N - first), from = p.M - p.N + first;
    float best[ROWS], sum[ROWS] = {};
    std::fill(best, best + ROWS, NOTHING);
    std::fill(w.y, w.y + ROWS * width, 0.f);
    std::fill(w.query, w.query + ROWS * p.A, 0.f);
    for (int64_t i = 0; i < rows; i++)
        read_row<kind>(q + (first + i) * p.qn, p, std::max<int64_t>(from + i, 0), scale_of(p), w.query + i * p.A);
    const int64_t begin = sight(p, from).first / BLOCK * BLOCK, end = sight(p, from + rows - 1).last;
    for (int64_t m = begin; m < end; m += BLOCK) {
        const int64_t columns = std::min(BLOCK, up(end - m, W));
        for (int64_t c = 0; c < columns; c += KEYS)
            product<false>(w.query, p.A, w.keys + (m + c) * p.A, KEYS, p.A, w.score + c, BLOCK, rows,
                           std::min(KEYS, columns - c));
        for (int64_t i = 0; i < rows; i++) {
            const Sight sees = sight(p, from + i);
            float* score = w.score + i * BLOCK;
            const int64_t skip = std::clamp<int64_t>(sees.first - m, 0, columns);
            const int64_t stop = std::clamp<int64_t>(sees.last - m, skip, columns);
            std::fill(score, score + skip, NOTHING);
            std::fill(score + stop, score + columns, NOTHING);
            weigh(score, columns, best[i], sum[i], w.y + i * width, width);
        }
        std::fill(w.score + rows * BLOCK, w.score + ROWS * BLOCK, 0.f);
        product<true>(w.score, BLOCK, w.values + m * width, width, std::min(BLOCK, end - m), w.y, width, rows, width);
    }
    for (int64_t i = 0; i < rows; i++) write_row<kind>(w.y + i * width, sum[i], p.A, y + (first + i) * p.A);
}

template <Kind kind>
bool many(const Problem& p) {
    using In = typename Numbers<kind>::In;
    const auto *q = static_cast<const In*>(p.q), *k = static_cast<const In*>(p.k), *v = static_cast<const In*>(p.v);
    auto* y = static_cast<In*>(p.y);
    const int64_t heads = p.B * p.J, G = p.H / p.J, width = up(p.A, W), blocks = (p.N + ROWS - 1) / ROWS * G;
    // with fewer heads than threads, each packs the keys for its part of the queries
    const int64_t parts = std::min(blocks, heads >= p.threads ? 1 : (p.threads + heads - 1) / heads);
    std::atomic<bool> failed{false};
    shared_out(heads * parts, 1, p.threads, [&](int64_t begin, int64_t end) {
        Workspace w;
        if (!w.make(p.M, p.A, width)) {
            failed = true;
            return;
        }
        for (int64_t task = begin; task < end; task++) {
            const int64_t head = task / parts, part = task % parts, b = head / p.J, j = head % p.J;
            pack<kind>(p, k + b * p.kb + j * p.kj, v + b * p.vb + j * p.vj, width, w);
            for (int64_t at = blocks * part / parts; at < blocks * (part + 1) / parts; at++) {
                const int64_t h = j * G + at % G;
                block_of_queries<kind>(p, q + b * p.qb + h * p.qh, at / G * ROWS, width, w,
                                       y + (b * p.H + h) * p.N * p.A);
            }
        }
    });
    return !failed;
}

// ---- few queries

// Rows of bfloat16 are read 2 W numbers at a time: the even ones, then the odd ones, which saves half of the work of
// making them float32. Queries and results are kept in the same order; what is left at the end of a row is in its own.
template <Kind kind>
void get_two(const typename Numbers<kind>::In* p, Vec& a, Vec& b) {
    if constexpr (kind == BFLOAT16) {
        Ints bits;
        std::memcpy(&bits, p, sizeof bits);
        a = reinterpret_cast<Vec>(bits << 16), b = reinterpret_cast<Vec>(bits & int(0xffff0000));
    } else {
        a = Numbers<kind>::get(p), b = Numbers<kind>::get(p + W);
    }
}

// `back`: from halves to neighbours
template <Kind kind>
void into_halves(float* row, int64_t A, bool back = false) {
    if constexpr (kind == BFLOAT16)
        for (; A >= 2 * W; A -= 2 * W, row += 2 * W) {
            float before[2 * W];
            std::copy(row, row + 2 * W, before);
            for (int64_t i = 0; i < 2 * W; i++) {
                const int64_t half = i % 2 * W + i / 2;
                row[back ? i : half] = before[back ? half : i];
            }
        }
}

// dot products of R queries with K keys
template <Kind kind, int R, int K>
void dots(const float* query, int64_t ldq, const typename Numbers<kind>::In* const* key, int64_t A, float* score) {
    Vec sum[R * K];
#pragma GCC unroll 16
    for (int i = 0; i < R * K; i++) sum[i] = zero();
    int64_t a = 0;
    for (; a + 2 * W <= A; a += 2 * W)
#pragma GCC unroll 16
        for (int j = 0; j < K; j++) {
            Vec one, two;
            get_two<kind>(key[j] + a, one, two);
#pragma GCC unroll 4
            for (int i = 0; i < R; i++) {
                sum[i * K + j] = fma(one, load(query + i * ldq + a), sum[i * K + j]);
                sum[i * K + j] = fma(two, load(query + i * ldq + a + W), sum[i * K + j]);
            }
        }
    if constexpr (R * K % W == 0) {
#pragma GCC unroll 4
        for (int s = 0; s < R * K; s += W) {
            float all[W];
            store(all, sums_of(reinterpret_cast<Vec(&)[W]>(sum[s])));
            for (int i = 0; i < W; i++) score[(s + i) / K * KEYS + (s + i) % K] = all[i];
        }
    } else {
#pragma GCC unroll 16
        for (int i = 0; i < R * K; i++) score[i / K * KEYS + i % K] = sum_of(sum[i]);
    }
    for (; a < A; a += W)
        for (int j = 0; j < K; j++) {
            const int64_t n = std::min(W, A - a);
            const Vec one = get_some<kind>(key[j] + a, n);
            for (int i = 0; i < R; i++) score[i * KEYS + j] += sum_of(one * get_some<FLOAT32>(query + i * ldq + a, n));
        }
}

template <class In>
void fetch(const In* p, int64_t numbers) {
    for (int64_t at = 0; at < numbers * int64_t(sizeof(In)); at += LINE)
        __builtin_prefetch(reinterpret_cast<const char*>(p) + at);
}

// y[R][n vectors] += weights[R][keys] times values; values some rows ahead are fetched
template <Kind kind, int R, int n>
void mix(const float* weight, const typename Numbers<kind>::In* value, int64_t step, int64_t keys, float* y,
         int64_t width, int64_t ahead) {
    Vec sum[R][n];
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) sum[i][j] = load(y + i * width + j * W);
    for (int64_t m = 0; m < keys; m++) {
        fetch(value + (m + ahead) * step, n * W);
        Vec row[n];
        if constexpr (n == 1) row[0] = Numbers<kind>::get(value + m * step);
        else
#pragma GCC unroll 2
            for (int j = 0; j < n; j += 2) get_two<kind>(value + m * step + j * W, row[j], row[j + 1]);
#pragma GCC unroll 4
        for (int i = 0; i < R; i++) {
            const Vec one = same(weight[i * KEYS + m]);
#pragma GCC unroll 4
            for (int j = 0; j < n; j++) sum[i][j] = fma(one, row[j], sum[i][j]);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < R; i++)
#pragma GCC unroll 4
        for (int j = 0; j < n; j++) store(y + i * width + j * W, sum[i][j]);
}

struct Part {
    std::vector<float> query, y, score;
    float best[FEW], sum[FEW];
};

template <Kind kind>
int64_t rows_ahead(const Problem& p) {
    return std::max<int64_t>(1, AHEAD / (p.A * int64_t(sizeof(typename Numbers<kind>::In))));
}

template <Kind kind, int R>
void scores_of(const Problem& p, const float* query, int64_t ldq, const typename Numbers<kind>::In* k, int64_t m,
               int64_t here, float* score) {
    constexpr int K = 16 / R;
    const int64_t ahead = rows_ahead<kind>(p);
    std::vector<float> turned;
    if (p.cosine != nullptr) turned.resize(up(p.A, W));
    for (int64_t j = 0; j < here; j += K) {
        const int64_t some = std::min<int64_t>(K, here - j);
        const typename Numbers<kind>::In* key[K];
        for (int64_t i = 0; i < K; i++) {
            key[i] = k + (m + j + std::min(i, some - 1)) * p.km;
            fetch(key[i] + ahead * p.km, p.A);
        }
        if (p.cosine != nullptr) {
            for (int64_t i = 0; i < some; i++) {
                read_row<kind>(key[i], p, m + j + i, 1.f, turned.data());
                const float* one[1] = {turned.data()};
                dots<FLOAT32, R, 1>(query, ldq, one, p.A, score + j + i);
            }
        } else if (some == K) {
            dots<kind, R, K>(query, ldq, key, p.A, score + j);
        } else {
            for (int64_t i = 0; i < some; i++) dots<kind, R, 1>(query, ldq, key + i, p.A, score + j + i);
        }
    }
}

template <Kind kind, int R>
void mixed(const Problem& p, const float* weight, const typename Numbers<kind>::In* v, int64_t keys, float* y,
           int64_t width) {
    const int64_t ahead = rows_ahead<kind>(p);
    int64_t a = 0;
    for (; a + 4 * W <= p.A; a += 4 * W) mix<kind, R, 4>(weight, v + a, p.vm, keys, y + a, width, ahead);
    if (a + 2 * W <= p.A) mix<kind, R, 2>(weight, v + a, p.vm, keys, y + a, width, ahead), a += 2 * W;
    if (a + W <= p.A) mix<kind, R, 1>(weight, v + a, p.vm, keys, y + a, width, ahead), a += W;
    if (a < p.A)
        for (int64_t m = 0; m < keys; m++) {
            const Vec one = get_some<kind>(v + m * p.vm + a, p.A - a);
            for (int i = 0; i < R; i++)
                store(y + i * width + a, fma(same(weight[i * KEYS + m]), one, load(y + i * width + a)));
        }
}

template <Kind kind>
void part_of_keys(const Problem& p, int64_t b, int64_t j, int64_t begin, int64_t end, int64_t width, Part& part) {
    using In = typename Numbers<kind>::In;
    const int64_t G = p.H / p.J, rows = G * p.N, ldq = up(p.A, W);
    part.query.assign(rows * ldq, 0.f), part.y.assign(rows * width, 0.f), part.score.resize(rows * KEYS);
    std::fill(part.best, part.best + FEW, NOTHING);
    std::fill(part.sum, part.sum + FEW, 0.f);
    const In* q = static_cast<const In*>(p.q) + b * p.qb;
    const In* k = static_cast<const In*>(p.k) + b * p.kb + j * p.kj;
    const In* v = static_cast<const In*>(p.v) + b * p.vb + j * p.vj;
    for (int64_t i = 0; i < rows; i++) {
        float* query = part.query.data() + i * ldq;
        read_row<kind>(q + (j * G + i / p.N) * p.qh + i % p.N * p.qn, p, std::max<int64_t>(p.M - p.N + i % p.N, 0),
                       scale_of(p), query);
        if (p.cosine == nullptr) into_halves<kind>(query, p.A);  // turned keys are float32
    }
    for (int64_t m = begin; m < end; m += KEYS) {
        const int64_t here = std::min(KEYS, end - m);
        for (int64_t i = 0; i < rows; i += 4) {
            const float* query = part.query.data() + i * ldq;
            float* score = part.score.data() + i * KEYS;
            if (rows - i >= 4) scores_of<kind, 4>(p, query, ldq, k, m, here, score);
            else
                for (int64_t r = 0; r < rows - i; r++)
                    scores_of<kind, 1>(p, query + r * ldq, ldq, k, m, here, score + r * KEYS);
        }
        for (int64_t i = 0; i < rows; i++) {
            const Sight sees = sight(p, p.M - p.N + i % p.N);
            float* score = part.score.data() + i * KEYS;
            const int64_t skip = std::clamp<int64_t>(sees.first - m, 0, KEYS);
            const int64_t stop = std::clamp<int64_t>(std::min(sees.last - m, here), 0, KEYS);
            std::fill(score, score + skip, NOTHING);
            std::fill(score + std::max(skip, stop), score + KEYS, NOTHING);
            weigh(score, KEYS, part.best[i], part.sum[i], part.y.data() + i * width, width);
        }
        for (int64_t i = 0; i < rows; i += 4) {
            const float* weight = part.score.data() + i * KEYS;
            float* y = part.y.data() + i * width;
            if (rows - i >= 4) mixed<kind, 4>(p, weight, v + m * p.vm, here, y, width);
            else
                for (int64_t r = 0; r < rows - i; r++)
                    mixed<kind, 1>(p, weight + r * KEYS, v + m * p.vm, here, y + r * width, width);
        }
    }
}

template <Kind kind>
void few(const Problem& p) {
    using In = typename Numbers<kind>::In;
    const int64_t heads = p.B * p.J, G = p.H / p.J, rows = G * p.N, width = up(p.A, W);
    const int64_t first = sight(p, p.M - p.N).first / KEYS * KEYS, last = sight(p, p.M - 1).last;
    const int64_t keys = std::max<int64_t>(last - first, 0);
    // several parts a thread, so that none waits long for the last
    const int64_t wanted = p.threads > 1 ? (4 * p.threads + heads - 1) / std::max<int64_t>(heads, 1) : 1;
    const int64_t most_parts = std::max<int64_t>(1, std::min(wanted, keys / SPLIT));
    const int64_t step = std::max(KEYS, up((keys + most_parts - 1) / most_parts, KEYS));
    const int64_t parts = std::max<int64_t>(1, (keys + step - 1) / step);
    std::vector<Part> done(heads * parts);
    shared_out(heads * parts, 1, p.threads, [&](int64_t begin, int64_t end) {
        for (int64_t task = begin; task < end; task++) {
            const int64_t head = task / parts, from = first + task % parts * step;
            part_of_keys<kind>(p, head / p.J, head % p.J, from, std::min(from + step, first + keys), width, done[task]);
        }
    });
    auto* y = static_cast<In*>(p.y);
    for (int64_t head = 0; head < heads; head++)
        for (int64_t i = 0; i < rows; i++) {
            Part& into = done[head * parts];
            float best = NOTHING, sum = 0;
            for (int64_t s = 0; s < parts; s++) best = std::max(best, done[head * parts + s].best[i]);
            for (int64_t s = 0; s < parts; s++) {
                Part& one = done[head * parts + s];
                const float factor = one.best[i] == NOTHING ? 0.f : std::exp2(one.best[i] - best);
                sum += factor * one.sum[i];
                for (int64_t a = 0; a < width; a++) {
                    const float add = factor * one.y[i * width + a];
                    into.y[i * width + a] = s ? into.y[i * width + a] + add : add;
                }
            }
            const int64_t b = head / p.J, h = head % p.J * G + i / p.N;
            into_halves<kind>(into.y.data() + i * width, p.A, true);
            write_row<kind>(into.y.data() + i * width, sum, p.A, y + ((b * p.H + h) * p.N + i % p.N) * p.A);
        }
}

template <Kind kind>
int attention(const Problem& p) {
    if (p.B * p.H * p.N * p.A == 0) return 0;
    if (p.H / p.J * p.N > FEW) return many<kind>(p) ? 0 : 1;
    few<kind>(p);
    return 0;
}

}  // namespace

extern "C" int mrb_attention(const Problem* p) {
    return (p->kind == FLOAT32 ? attention<FLOAT32> : p->kind == BFLOAT16 ? attention<BFLOAT16> : attention<FLOAT16>)(*p);
}
