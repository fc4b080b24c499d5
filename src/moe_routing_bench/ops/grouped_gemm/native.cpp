// Each expert's rows times its matrix, and the gradient of the matrices. Weights are packed into the caches, a strip at a
// time, just before they are used, for training, where they change at every step. Weights of an expert with few rows
// are read in place if the bits are the same.
#include "../in_place.h"

enum { WIDEST = 8 };  // panels of one task

struct Problem {  // mirrored in native.py
  const void *x, *w;
  const float* bias;  // E x columns, may be null
  const int64_t *offset_E1, *count_E;
  void* y;
  int64_t ldx, rows, E, depth, columns, se, sk, sn;  // strides of w: expert, depth, column
  int64_t threads, size;                             // size: bytes of a number
};

struct Segment {
  int64_t expert, first, rows;
};

static thread_local Workspace workspace;

static std::vector<Segment> segments(const int64_t* offset_E1, const int64_t* count_E, int64_t E) {  // largest first
  std::vector<Segment> found;
  for (int64_t e = 0; e < E; e++)
    if (count_E[e]) found.push_back({e, offset_E1[e], count_E[e]});
  std::stable_sort(found.begin(), found.end(), [](auto& l, auto& r) { return l.rows > r.rows; });
  return found;
}

static void nothing() {}

static bool spans_fit(const int64_t* offset_E1, const int64_t* count_E, int64_t E, int64_t rows) {
  for (int64_t e = 0; e < E; e++)
    if (offset_E1[e] < 0 || offset_E1[e + 1] < offset_E1[e] || offset_E1[e + 1] > rows || count_E[e] < 0 ||
        count_E[e] > offset_E1[e + 1] - offset_E1[e])
      return false;
  return true;
}

template <class X> static void put_row(X* to, const float* c, const float* bias, int64_t columns) {
  for (int64_t j = 0; j < columns; j += HALF) {
    const int64_t left = std::min<int64_t>(HALF, columns - j);
    if (left == HALF) {
      store(to + j, bias ? load(c + j) + load(bias + j) : load(c + j));
    } else {
      float some[HALF] = {};
      X tail[HALF];
      if (bias) memcpy(some, bias + j, left * 4);
      store(tail, load(c + j) + load(some));
      memcpy(to + j, tail, left * sizeof(X));
    }
  }
}

template <class Engine, class X> static int multiply(const Problem& p) {
  typedef typename Engine::A A;
  typedef typename Engine::B B;
  const int64_t depth = packed_depth(p.depth), all_panels = panels(p.columns, false), panel_size = depth * PANEL;
  const auto order = segments(p.offset_E1, p.count_E, p.E);
  const bool direct = sizeof(X) == sizeof(A) && depth == p.depth;  // else rows are widened or padded
  const int64_t lda = direct ? p.ldx : row_stride(p.depth, sizeof(A));
  const int64_t in_cache = std::max<int64_t>(1, (CACHE_BYTES / 2) / (panel_size * (int64_t)sizeof(B)));
  const int64_t even = (int64_t)order.size() * all_panels / (8 * p.threads);
  const int64_t wide = std::clamp<int64_t>(std::min(in_cache, even), 1, WIDEST);
  const auto tasks = cut(order, all_panels, 4 * p.threads, [&](auto& s) { return in_place<Engine>(s.rows, p.sk, p.sn, p.depth, true) ? (int64_t)IN_PLACE : wide; });
  const int64_t strip_bytes = up_to(wide * panel_size * sizeof(B), 4096);
  const int64_t a_bytes = direct ? 0 : up_to(p.rows * lda * sizeof(A), 4096);
  // a strip, or sums of weights read in place
  const int64_t own_bytes = strip_bytes + SUMS_BYTES + up_to(InPlace<Engine>::part_bytes(InPlace<Engine>::FEW, p.depth), 4096);
  char* memory = workspace.get(p.threads * own_bytes + a_bytes + 8192);
  if (!memory) return 1;
  A* a = direct ? (A*)p.x : (A*)(memory + p.threads * own_bytes);
  X* y = (X*)p.y;
#pragma omp parallel num_threads(p.threads)
  {
#pragma omp for schedule(static) nowait
    for (int64_t e = 0; e <= p.E; e++) {  // rows without a pair
      const int64_t from = e < p.E ? p.offset_E1[e] + p.count_E[e] : p.offset_E1[p.E];
      const int64_t to = e < p.E ? p.offset_E1[e + 1] : p.rows;
      memset(y + from * p.columns, 0, (to - from) * p.columns * sizeof(X));
    }
    if (!direct) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < p.rows; r++) {
        const X* from = (const X*)p.x + r * p.ldx;
        for (int64_t k = 0; k < p.depth; k++)
          if (sizeof(X) == sizeof(A)) ((X*)a)[r * lda + k] = from[k];
          else ((float*)a)[r * lda + k] = one(from + k);
        memset(a + r * lda + p.depth, 0, (depth - p.depth) * sizeof(A));
      }
    }
    Engine::begin();
    B* strip = (B*)(memory + omp_get_thread_num() * own_bytes);
    float *sums = (float*)((char*)strip + strip_bytes), *part = sums + SUMS_BYTES / sizeof(float);
    float c[Engine::STEP * PANEL] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 1)
    for (size_t task = 0; task < tasks.size(); task++) {
      const auto [segment, begin, end] = tasks[task];
      const Segment& s = order[segment];
      const float* bias = p.bias ? p.bias + s.expert * p.columns : nullptr;
      if (in_place<Engine>(s.rows, p.sk, p.sn, p.depth, true)) {
        const int64_t n0 = begin * PANEL, columns = std::min(end * PANEL, p.columns) - n0, ldc = (end - begin) * PANEL;
        InPlace<Engine>::times(a + s.first * lda, lda, s.rows, (const B*)p.w + s.expert * p.se + n0 * p.sn, p.sk, p.sn, p.depth,
                               columns, sums, ldc, true, part);
        for (int64_t r = 0; r < s.rows; r++)
          put_row(y + (s.first + r) * p.columns + n0, sums + r * ldc, bias ? bias + n0 : nullptr, columns);
        continue;
      }
      pack_strip(strip, (const B*)p.w + s.expert * p.se, p.sk, p.sn, p.depth, p.columns, begin, end, false);
      const int64_t tile = up_to(std::max<int64_t>(1, CACHE_BYTES / 2 / (lda * sizeof(A))), Engine::STEP);
      for (int64_t r0 = 0; r0 < s.rows; r0 += tile)
        for (int64_t panel = begin; panel < end; panel++) {
          const int64_t m = std::min(tile, s.rows - r0), step = block_rows<Engine>(m), n0 = panel * PANEL;
          for (int64_t r = r0; r < r0 + m; r += step) {
            const int rows = (int)std::min(step, r0 + m - r);
            Ahead none = {nullptr, 0};
            Engine::times(a + (s.first + r) * lda, lda, rows, strip + (panel - begin) * panel_size, depth, c, none, nothing);
            for (int i = 0; i < rows; i++)
              put_row(y + (s.first + r + i) * p.columns + n0, c + i * PANEL, bias ? bias + n0 : nullptr,
                      std::min<int64_t>(PANEL, p.columns - n0));
          }
        }
    }
    Engine::end();
  }
  return 0;
}

// ---- gradient of the matrices: out[e] (above x below) = upper_e^T lower_e, over the rows of expert e

struct Gradient {  // mirrored in native.py
  const void *upper, *lower;
  const int64_t *offset_E1, *count_E;
  void* out;
  int64_t ld_upper, ld_lower, E, above, below, threads, size;
};

// the result does not fit in the caches; with streaming stores a line is not read before it is written
static inline void put(float* to, const float* c) {
#ifdef __AVX512F__
  if ((uintptr_t)to % 64 == 0) {
    _mm512_stream_ps(to, _mm512_loadu_ps(c));
    _mm512_stream_ps(to + HALF, _mm512_loadu_ps(c + HALF));
    return;
  }
#endif
  store(to, load(c)), store(to + HALF, load(c + HALF));
}
static inline void put(uint16_t* to, const float* c) {
#ifdef __AVX512F__
  if ((uintptr_t)to % 64 == 0) {
    uint16_t line[PANEL] __attribute__((aligned(64)));
    store(line, load(c)), store(line + HALF, load(c + HALF));
    _mm512_stream_si512((__m512i*)to, _mm512_load_si512(line));
    return;
  }
#endif
  store(to, load(c)), store(to + HALF, load(c + HALF));
}

template <class Engine, class X> static int gradient(const Gradient& g) {
  typedef typename Engine::A A;
  typedef typename Engine::B B;
  const auto order = segments(g.offset_E1, g.count_E, g.E);
  const int64_t most = order.empty() ? 0 : packed_depth(order[0].rows), all_panels = panels(g.below, false);
  const int64_t parts = order.empty() ? 1 : std::clamp<int64_t>(8 * g.threads / (int64_t)order.size(), 1, all_panels);
  const int64_t wide = (all_panels + parts - 1) / parts;
  const int64_t a_bytes = up_to(up_to(g.above, PANEL) * row_stride(most, sizeof(A)) * sizeof(A), 4096);
  const int64_t b_bytes = up_to(wide * most * PANEL * sizeof(B), 4096);
  char* memory = workspace.get(g.threads * (a_bytes + b_bytes) + 4096);
  if (!memory) return 1;
  X* out = (X*)g.out;
  const int64_t size = g.above * g.below;
#pragma omp parallel num_threads(g.threads)
  {
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t e = 0; e < g.E; e++)
      if (!g.count_E[e]) memset(out + e * size, 0, size * sizeof(X));
    A* a = (A*)(memory + omp_get_thread_num() * (a_bytes + b_bytes));
    B* b = (B*)((char*)a + a_bytes);
    float c[Engine::STEP * PANEL] __attribute__((aligned(64)));
    Engine::begin();
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < (int64_t)order.size() * parts; task++) {
      const Segment& s = order[task / parts];
      const int64_t depth = packed_depth(s.rows), lda = row_stride(s.rows, sizeof(A));
      const int64_t begin = task % parts * wide, end = std::min(begin + wide, all_panels);
      const X* upper = (const X*)g.upper + s.first * g.ld_upper;
      const X* lower = (const X*)g.lower + s.first * g.ld_lower;
      for (int64_t k0 = 0; k0 < g.above; k0 += 32)  // rows to columns, a block of 32 x 32 at a time
        for (int64_t r0 = 0; r0 < depth; r0 += 32)
          for (int64_t k = k0; k < std::min(k0 + 32, g.above); k++)
            for (int64_t r = r0; r < r0 + 32; r++) {
              const X* from = upper + r * g.ld_upper + k;
              if (sizeof(X) == sizeof(A)) ((X*)a)[k * lda + r] = r < s.rows ? *from : X(0);
              else ((float*)a)[k * lda + r] = r < s.rows ? one(from) : 0.f;
            }
      pack_strip(b, (const B*)lower, g.ld_lower, 1, s.rows, g.below, begin, end, false);
      for (int64_t k = 0; k < g.above; k += Engine::STEP)
        for (int64_t panel = begin; panel < end; panel++) {
          const int rows = (int)std::min<int64_t>(Engine::STEP, g.above - k);
          const int64_t n0 = panel * PANEL, left = std::min<int64_t>(PANEL, g.below - n0);
          Ahead none = {nullptr, 0};
          Engine::times(a + k * lda, lda, rows, b + (panel - begin) * depth * PANEL, depth, c, none, nothing);
          for (int i = 0; i < rows; i++) {
            X* to = out + s.expert * size + (k + i) * g.below + n0;
            if (left == PANEL) {
              put(to, c + i * PANEL);
            } else {
              X tail[PANEL];
              store(tail, load(c + i * PANEL)), store(tail + HALF, load(c + i * PANEL + HALF));
              memcpy(to, tail, left * sizeof(X));
            }
          }
        }
    }
    Engine::end();
    after_streaming();
  }
  if (workspace.size > (size_t)(64 << 20)) workspace.release();
  return 0;
}

extern "C" {

int mrb_multiply(const Problem* p) {  // returns 0; 1: no memory; 3: the plan has an index outside
  if (!spans_fit(p->offset_E1, p->count_E, p->E, p->rows)) return 3;
  return p->size == 4 ? multiply<Float32, float>(*p) : multiply<Bfloat16, uint16_t>(*p);
}

int mrb_gradient(const Gradient* g) {
  return g->size == 4 ? gradient<Float32, float>(*g) : gradient<Bfloat16, uint16_t>(*g);
}
}
