/* A few rows times a weight matrix, for one core of an Arm CPU.

   A verification or a step of a tree multiplies 2 to some 30 rows. BLAS packs the whole weight anew
   for each such product, which costs more than the product; here it is packed once, when the model
   is loaded: panels of 8 outputs, each [inputs][8]. Every sum runs over the inputs in order, one
   fused step at a time, so that a row's result does not depend on the rows beside it.
*/

#ifdef __aarch64__

#include <arm_neon.h>
#include <stddef.h>
#include <string.h>

#define PANEL 8     /* outputs side by side: two vectors */
#define MOST_ROWS 8 /* of a tile: 16 sums and 8 rows are in registers */
#define GROUP 4     /* panels that the rows of one product go through in turn */
#define AHEAD 256   /* inputs, that are fetched early */
#define UNROLL _Pragma("GCC unroll 16")

/* Inlined with constant ROWS and PANELS: all arrays become registers. ``width`` <= 8 * PANELS
   outputs are stored; ``k`` inputs, ``n`` outputs of a whole row. */
static inline __attribute__((always_inline)) void tile(const int rows, const int panels,
                                                       const float *x, const float *w, float *y,
                                                       size_t k, size_t n, size_t width) {
    float32x4_t sums[MOST_ROWS][2 * GROUP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * panels; v++) sums[r][v] = vdupq_n_f32(0.0f);
    size_t i = 0;
    for (; i + 4 <= k; i += 4) {
        float32x4_t in[MOST_ROWS];
        UNROLL for (int r = 0; r < rows; r++) in[r] = vld1q_f32(x + r * k + i);
        UNROLL for (int p = 0; p < panels; p++) {
            __builtin_prefetch(w + (p * k + i + AHEAD) * PANEL);
            __builtin_prefetch(w + (p * k + i + AHEAD + 2) * PANEL);
        }
#define STEP(lane)                                                                         \
    UNROLL for (int v = 0; v < 2 * panels; v++) {                                          \
        float32x4_t weights = vld1q_f32(w + ((v / 2) * k + i + lane) * PANEL + v % 2 * 4); \
        UNROLL for (int r = 0; r < rows; r++)                                              \
            sums[r][v] = vfmaq_laneq_f32(sums[r][v], weights, in[r], lane);                \
    }
        STEP(0) STEP(1) STEP(2) STEP(3)
    }
    for (; i < k; i++)
        UNROLL for (int v = 0; v < 2 * panels; v++) {
            float32x4_t weights = vld1q_f32(w + ((v / 2) * k + i) * PANEL + v % 2 * 4);
            UNROLL for (int r = 0; r < rows; r++)
                sums[r][v] = vfmaq_n_f32(sums[r][v], weights, x[r * k + i]);
        }
    UNROLL for (int r = 0; r < rows; r++) {
        float out[PANEL * GROUP];
        float *to = width == (size_t)(PANEL * panels) ? y + r * n : out;
        UNROLL for (int v = 0; v < 2 * panels; v++) vst1q_f32(to + 4 * v, sums[r][v]);
        if (to == out) memcpy(y + r * n, out, width * sizeof(float));
    }
}

typedef void (*tile_function)(const float *, const float *, float *, size_t, size_t, size_t);
#define TILE(rows, panels)                                                                  \
    static void tile_##rows##_##panels(const float *x, const float *w, float *y, size_t k,  \
                                       size_t n, size_t width) {                            \
        tile(rows, panels, x, w, y, k, n, width);                                           \
    }
TILE(1, 4) TILE(1, 1) TILE(2, 2) TILE(2, 1) TILE(3, 2) TILE(3, 1)
TILE(4, 1) TILE(5, 2) TILE(5, 1) TILE(6, 1) TILE(7, 1) TILE(8, 1)

/* Few rows take several panels at once: eight sums at least must be under way. */
static const struct { tile_function wide, narrow; size_t panels; } TILES[MOST_ROWS + 1] = {
    {0, 0, 0},
    {tile_1_4, tile_1_1, 4}, {tile_2_2, tile_2_1, 2}, {tile_3_2, tile_3_1, 2},
    {tile_4_1, tile_4_1, 1}, {tile_5_2, tile_5_1, 2}, {tile_6_1, tile_6_1, 1},
    {tile_7_1, tile_7_1, 1}, {tile_8_1, tile_8_1, 1},
};

/* y [m, n] = x [m, k] times the transpose of the packed weight [n, k]. */
void few_rows(const float *x, const float *w, float *y, size_t m, size_t n, size_t k) {
    size_t tiles = (m + MOST_ROWS - 1) / MOST_ROWS;
    for (size_t begin = 0; begin < n; begin += PANEL * GROUP) {
        size_t left = n - begin < PANEL * GROUP ? n - begin : PANEL * GROUP;
        size_t row = 0;
        for (size_t t = 0; t < tiles; t++) {
            size_t rows = m / tiles + (t < m % tiles);
            size_t step = PANEL * TILES[rows].panels;
            for (size_t o = 0; o < left;) {
                int whole = o + step <= left;
                size_t wide = whole ? step : PANEL;
                size_t width = wide < left - o ? wide : left - o;
                (whole ? TILES[rows].wide : TILES[rows].narrow)(
                    x + row * k, w + (begin + o) * k, y + row * n + begin + o, k, n, width);
                o += wide;
            }
            row += rows;
        }
    }
}

#endif
