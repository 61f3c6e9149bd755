/* The tiles of one instruction set: see instruction_sets.h.

   WHOLE_ROWS  most rows whose sums over a whole panel fit into registers
   MOST_ROWS   likewise over half a panel; equal to WHOLE_ROWS where halves do not pay
*/

#define VECTORS (PANEL / LANES)

/* Some vectors of one input's weights, as floats. HALF: 0 or 1, or -1 for the whole panel. */
static inline __attribute__((always_inline)) TARGET void SET(weights_of)(
    const int half, const int narrow, const char *w, FLOATS *weights) {
    const int count = half < 0 ? VECTORS : VECTORS / 2;
    UNROLL for (int v = 0; v < count; v++) {
        if (!narrow) {
            weights[v] = LOAD((const float *)w + (half > 0 ? PANEL / 2 : 0) + v * LANES);
            continue;
        }
        WORDS words = LOAD_WORDS((const uint32_t *)w + v % (VECTORS / 2) * LANES);
        weights[v] = half > 0 || v >= VECTORS / 2 ? HIGH(words) : LOW(words);
    }
}

/* Inlined with constant ROWS, HALF and NARROW: all arrays become registers. x is [inputs][rows]. */
static inline __attribute__((always_inline)) TARGET void SET(tile)(
    const int rows, const int half, const int narrow, const float *x, const char *w, float *y,
    size_t inputs, size_t stride, int goes_on) {
    const int count = half < 0 ? VECTORS : VECTORS / 2;
    const size_t step = PANEL * (narrow ? sizeof(uint16_t) : sizeof(float));
    FLOATS sums[MOST_ROWS][VECTORS];
    y += half > 0 ? PANEL / 2 : 0;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < count; v++)
            sums[r][v] = goes_on ? LOAD(y + r * stride + v * LANES) : SPREAD(0.0f);
    for (size_t i = 0; i < inputs; i++, w += step, x += rows) {
        FLOATS weights[VECTORS];
        /* For the second half of a panel it is in a cache already. */
        UNROLL for (size_t line = 0; line < step && half <= 0; line += 64)
            __builtin_prefetch(w + AHEAD + line);
        SET(weights_of)(half, narrow, w, weights);
        UNROLL for (int r = 0; r < rows; r++) {
            FLOATS in = SPREAD(x[r]);
            UNROLL for (int v = 0; v < count; v++)
                sums[r][v] = ADD_PRODUCT(sums[r][v], weights[v], in);
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < count; v++) STORE(y + r * stride + v * LANES, sums[r][v]);
}

static inline __attribute__((always_inline)) TARGET void SET(panel)(
    const int rows, const int narrow, const float *x, const char *w, float *y, size_t inputs,
    size_t stride, int goes_on) {
    if (rows <= WHOLE_ROWS) {
        SET(tile)(rows, -1, narrow, x, w, y, inputs, stride, goes_on);
    } else {
        SET(tile)(rows, 0, narrow, x, w, y, inputs, stride, goes_on);
        SET(tile)(rows, 1, narrow, x, w, y, inputs, stride, goes_on);
    }
}

#define TILE(rows)                                                                             \
    static TARGET void SET(wide_##rows)(const float *x, const char *w, float *y, size_t inputs, \
                                        size_t stride, int goes_on) {                          \
        SET(panel)(rows, 0, x, w, y, inputs, stride, goes_on);                                 \
    }                                                                                          \
    static TARGET void SET(narrow_##rows)(const float *x, const char *w, float *y,             \
                                          size_t inputs, size_t stride, int goes_on) {         \
        SET(panel)(rows, 1, x, w, y, inputs, stride, goes_on);                                 \
    }
#define BOTH(rows) {SET(wide_##rows), SET(narrow_##rows)}

TILE(1) TILE(2) TILE(3) TILE(4)
#if MOST_ROWS > 4
TILE(5)
#endif
#if MOST_ROWS > 5
TILE(6)
#endif
#if MOST_ROWS > 6
TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12) TILE(13) TILE(14)
#endif

static const struct instruction_set SET(set) = {
    MOST_ROWS,
    WHOLE_ROWS,
    {
        {0, 0}, BOTH(1), BOTH(2), BOTH(3), BOTH(4),
#if MOST_ROWS > 4
        BOTH(5),
#endif
#if MOST_ROWS > 5
        BOTH(6),
#endif
#if MOST_ROWS > 6
        BOTH(7), BOTH(8), BOTH(9), BOTH(10), BOTH(11), BOTH(12), BOTH(13), BOTH(14),
#endif
    },
};

#undef VECTORS
#undef TILE
#undef BOTH
