// Tokens times a matrix that lies output first. Packed once, its panels are read front to back; else they are packed a
// strip at a time into the caches, and for few tokens the matrix is read where it is. Weights of 8 and 4 bits (coded.h) are
// always packed; rows of 8 bits are made from the tokens in every call.
#include "../in_place.h"
#include "../int8_tiles.h"

enum { WIDEST = 8 };  // panels of one task

struct Problem {  // mirrored in native.py
  const void *x, *w;
  const float* bias;  // may be null
  void* y;
  const Coding* coding;  // of weights in 8 and 4 bits; else null
  int64_t ldx, T, depth, columns, panel, sn, sk, packed, threads;  // panel: to the next, in elements; strides of w: column, depth
  int64_t size, packed_size;  // bytes of a number of x, and of w
};

struct Packing {
  const void* w;
  int64_t sn, sk, depth, columns, threads, size;
  void* panels;
};

struct Rows {
  int64_t rows;
};

static thread_local Workspace workspace;
static void nothing() {}

template <class X> static void put_row(X* to, const float* c, const float* bias, int64_t columns) {
  for (int64_t j = 0; j < columns; j += HALF) {
    const int64_t left = std::min<int64_t>(HALF, columns - j);
    float some[HALF] = {};
    if (bias) memcpy(some, bias + j, left * 4);
    X line[HALF];
    store(line, load(c + j) + load(some));
    memcpy(to + j, line, left * sizeof(X));
  }
}

template <class Engine, class X> static int multiply(const Problem& p) {
  typedef typename Engine::A A;
  typedef typename Engine::B B;
  constexpr bool int8_rows = sizeof(A) == 1;
  const int64_t depth = packed_depth(p.depth), all_panels = panels(p.columns, false), panel_size = p.panel;
  const bool direct = sizeof(X) == sizeof(A) && depth == p.depth;  // else rows are widened, rounded or filled up
  const int64_t lda = direct ? p.ldx : int8_rows ? int8_row_stride(p.depth, *p.coding) : row_stride(p.depth, sizeof(A));
  bool reads = false;
  if constexpr (sizeof(B) > 1) reads = !p.packed && in_place<Engine>(p.T, p.sk, p.sn, p.depth, false);
  const int64_t in_cache = std::max<int64_t>(1, (CACHE_BYTES / 2) / (panel_size * (int64_t)sizeof(B)));
  const int64_t wide = std::clamp<int64_t>(std::min(in_cache, all_panels / (4 * p.threads)), 1, WIDEST);
  const std::vector<Rows> order = {{p.T}};
  const auto tasks = cut(order, all_panels, 4 * p.threads, [&](auto&) { return reads ? (int64_t)IN_PLACE : wide; });
  int64_t own_bytes = p.packed ? 0 : up_to(wide * panel_size * sizeof(B), 4096);
  if constexpr (sizeof(B) > 1)
    if (reads) own_bytes = SUMS_BYTES + up_to(InPlace<Engine>::part_bytes(p.T, p.depth), 4096);
  const int64_t a_bytes = direct ? 0 : up_to(p.T * lda * sizeof(A), 4096);
  char* memory = workspace.get(p.threads * own_bytes + a_bytes + 8192);
  if (!memory) return 1;
  A* a = direct ? (A*)p.x : (A*)(memory + p.threads * own_bytes);
  X* y = (X*)p.y;
#pragma omp parallel num_threads(p.threads) if (p.threads > 1)
  {
    if (!direct) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < p.T; r++) {
        const X* from = (const X*)p.x + r * p.ldx;
        if constexpr (int8_rows) {
          quantise_row(from, p.depth, a + r * lda, *p.coding);
          continue;
        }
        for (int64_t k = 0; k < p.depth; k++)
          if (sizeof(X) == sizeof(A)) ((X*)a)[r * lda + k] = from[k];
          else ((float*)a)[r * lda + k] = one(from + k);
        memset(a + r * lda + p.depth, 0, (depth - p.depth) * sizeof(A));
      }
    }
    Engine::begin();
    char* own = memory + omp_get_thread_num() * own_bytes;
    float c[Engine::STEP * PANEL] __attribute__((aligned(64)));
#pragma omp for schedule(dynamic, 1)
    for (size_t task = 0; task < tasks.size(); task++) {
      const int64_t begin = tasks[task].begin, end = tasks[task].end;
      if constexpr (sizeof(B) > 1)
        if (reads) {
          const int64_t n0 = begin * PANEL, columns = std::min(end * PANEL, p.columns) - n0, ldc = (end - begin) * PANEL;
          float *sums = (float*)own, *part = sums + SUMS_BYTES / sizeof(float);
          InPlace<Engine>::times(a, lda, p.T, (const B*)p.w + n0 * p.sn, p.sk, p.sn, p.depth, columns, sums, ldc, false, part);
          for (int64_t r = 0; r < p.T; r++)
            put_row(y + r * p.columns + n0, sums + r * ldc, p.bias ? p.bias + n0 : nullptr, columns);
          continue;
        }
      const B* strip = (const B*)p.w + begin * panel_size;
      if constexpr (sizeof(B) > 1)
        if (!p.packed) {
          pack_strip((B*)own, (const B*)p.w, p.sk, p.sn, p.depth, p.columns, begin, end, false);
          strip = (const B*)own;
        }
      const int64_t tile = up_to(std::max<int64_t>(1, CACHE_BYTES / 2 / (lda * sizeof(A))), Engine::STEP);
      for (int64_t r0 = 0; r0 < p.T; r0 += tile)
        for (int64_t panel = begin; panel < end; panel++) {
          const B* b = strip + (panel - begin) * panel_size;
          const int64_t m = std::min(tile, p.T - r0), step = block_rows<Engine>(m), n0 = panel * PANEL;
          for (int64_t r = r0; r < r0 + m; r += step) {
            const int rows = (int)std::min(step, r0 + m - r);
            // packed weights that meet one block of rows come from memory: call what follows
            Ahead ahead = p.packed && p.T <= step ? Ahead::in(b, panel_size * (int64_t)sizeof(B) * 32 / depth) : Ahead{nullptr, 0};
            Engine::times(a + r * lda, lda, rows, b, depth, c, ahead, nothing, p.coding);
            for (int i = 0; i < rows; i++)
              put_row(y + (r + i) * p.columns + n0, c + i * PANEL, p.bias ? p.bias + n0 : nullptr,
                      std::min<int64_t>(PANEL, p.columns - n0));
          }
        }
    }
    Engine::end();
  }
  return 0;
}

template <int CODE> static int coded(const Problem& p) {
  if constexpr (CODE != E4M3)
    if (p.coding->int8_rows)
      return p.size == 4 ? multiply<RowsOf8Bits<CODE>, float>(p) : multiply<RowsOf8Bits<CODE>, uint16_t>(p);
  return p.size == 4 ? multiply<Coded<CODE>, float>(p) : multiply<Coded<CODE>, uint16_t>(p);
}

template <class B> static void pack(const Packing& p) {
  const int64_t size = packed_depth(p.depth) * PANEL, all_panels = panels(p.columns, false);
#pragma omp parallel for schedule(dynamic, 1) num_threads(p.threads)
  for (int64_t panel = 0; panel < all_panels; panel++)
    pack_strip((B*)p.panels + panel * size, (const B*)p.w, p.sk, p.sn, p.depth, p.columns, panel, panel + 1, false);
}

extern "C" {

int mrb_linear_pack(const Packing* p) {
  p->size == 4 ? pack<float>(*p) : pack<uint16_t>(*p);
  return 0;
}

int mrb_linear(const Problem* p) {  // 0; 1: there was no memory
  if (p->T == 0 || p->columns == 0) return 0;
  if (p->coding && p->coding->code == INT8) return coded<INT8>(*p);
  if (p->coding && p->coding->code == E4M3) return coded<E4M3>(*p);
  if (p->coding) return coded<NIBBLE>(*p);
  if (p->packed_size < p->size) return multiply<Vector<uint16_t>, float>(*p);
  return p->size == 4 ? multiply<Float32, float>(*p) : multiply<Bfloat16, uint16_t>(*p);
}
}
