/* Attention of some rows of one sequence, by one instruction set: see instruction_sets.h.

   A query's numbers are summed in WIDE columns, which are added in one order at the end; so are the
   weights of its keys. What it sees is taken in order. Vectors of any length so give the same bits.
*/

#define COLUMNS (WIDE / LANES) /* vectors */
#define CHUNK (4 * LANES)      /* numbers of a value that are summed at a time */
#define QUERIES (LANES >= 16 ? 4 : 1) /* that keys and values are read for together */

typedef int32_t SET(ints) __attribute__((vector_size(4 * LANES)));

/* The floats that are left from number AT on, then zeros. */
static inline __attribute__((always_inline)) TARGET FLOATS SET(load_rest)(const float *from,
                                                                          size_t at, size_t dim) {
    float rest[LANES] = {0};
    if (at < dim) memcpy(rest, from + at, at_most(dim - at, LANES) * sizeof(float));
    return LOAD(rest);
}

static inline __attribute__((always_inline)) TARGET void SET(store_rest)(float *to, size_t at,
                                                                         size_t dim, FLOATS v) {
    float rest[LANES];
    STORE(rest, v);
    if (at < dim) memcpy(to + at, rest, at_most(dim - at, LANES) * sizeof(float));
}

/* Of four times WIDE floats each the sum: halves are added until one is left. */
static inline __attribute__((always_inline)) TARGET void SET(sum_each)(FLOATS columns[4][COLUMNS],
                                                                       float *sums) {
    FLOATS folded[4];
    UNROLL for (int i = 0; i < 4; i++) {
        UNROLL for (int n = COLUMNS / 2; n > 0; n /= 2)
            UNROLL for (int v = 0; v < n; v++) columns[i][v] = columns[i][v] + columns[i][v + n];
        folded[i] = columns[i][0];
    }
    SUM_EACH(folded, sums);
}

/* The larger of each two; b where either is no number. */
static inline __attribute__((always_inline)) TARGET FLOATS SET(larger)(FLOATS a, FLOATS b) {
    SET(ints) first = (SET(ints))(a > b);
    return (FLOATS)((first & (SET(ints))a) | (~first & (SET(ints))b));
}

/* Of numbers that are not above 0: a power of two, by the exponent, times a polynomial. */
static inline __attribute__((always_inline)) TARGET FLOATS SET(exponential)(FLOATS x) {
    const FLOATS shifter = SPREAD(12582912.0f); /* what is added to it becomes a whole number */
    x = SET(larger)(SPREAD(-87.0f), x);
    FLOATS shifted = ADD_PRODUCT(shifter, x, SPREAD(1.44269504f)), whole = shifted - shifter;
    FLOATS rest = ADD_PRODUCT(x, whole, SPREAD(-0.693145752f));
    rest = ADD_PRODUCT(rest, whole, SPREAD(-1.42860677e-6f));
    FLOATS power = SPREAD(1.3888889e-3f);
    power = ADD_PRODUCT(SPREAD(8.3333333e-3f), power, rest);
    power = ADD_PRODUCT(SPREAD(4.1666667e-2f), power, rest);
    power = ADD_PRODUCT(SPREAD(1.6666667e-1f), power, rest);
    power = ADD_PRODUCT(SPREAD(0.5f), power, rest);
    power = ADD_PRODUCT(SPREAD(1.0f), power, rest);
    power = ADD_PRODUCT(SPREAD(1.0f), power, rest);
    return (FLOATS)((SET(ints))power + ((SET(ints))shifted << 23));
}

/* Products of some queries with four keys. */
static inline __attribute__((always_inline)) TARGET void SET(score_four)(
    const int queries, const size_t dim, const struct query *query, const float *const *keys,
    float (*scores)[4]) {
    FLOATS columns[QUERIES][4][COLUMNS];
    UNROLL for (int q = 0; q < queries; q++)
        UNROLL for (int j = 0; j < 4; j++)
            UNROLL for (int v = 0; v < COLUMNS; v++) columns[q][j][v] = SPREAD(0.0f);
    size_t i = 0;
    for (; i + WIDE <= dim; i += WIDE)
        UNROLL for (int v = 0; v < COLUMNS; v++)
            UNROLL for (int j = 0; j < 4; j++) {
                FLOATS key = LOAD(keys[j] + i + v * LANES);
                UNROLL for (int q = 0; q < queries; q++)
                    columns[q][j][v] =
                        ADD_PRODUCT(columns[q][j][v], LOAD(query[q].in + i + v * LANES), key);
            }
    for (int v = 0; i < dim; v++, i += LANES)
        for (int j = 0; j < 4; j++)
            for (int q = 0; q < queries; q++)
                columns[q][j][v] =
                    ADD_PRODUCT(columns[q][j][v], SET(load_rest)(query[q].in, i, dim),
                                SET(load_rest)(keys[j], i, dim));
    UNROLL for (int q = 0; q < queries; q++) SET(sum_each)(columns[q], scores[q]);
}

/* Fewer than four are computed as four, of which the last one is repeated. */
static inline __attribute__((always_inline)) TARGET void SET(score_all)(
    const int queries, const size_t dim, const struct query *query, const float *const *keys,
    size_t at, size_t count) {
    for (size_t j = 0; j < count; j += 4) {
        const size_t some = at_most(count - j, 4);
        const float *four[4];
        float scores[QUERIES][4];
        UNROLL for (size_t k = 0; k < 4; k++) four[k] = keys[j + at_most(k, some - 1)];
        SET(score_four)(queries, dim, query, four, scores);
        UNROLL for (int q = 0; q < queries; q++)
            for (size_t k = 0; k < some; k++) query[q].scores[at + j + k] = scores[q][k];
    }
}

static TARGET void SET(score)(const struct query *query, size_t queries, size_t dim,
                              const float *const *keys, size_t at, size_t count) {
    if (queries == QUERIES && dim == 64)
        SET(score_all)(QUERIES, 64, query, keys, at, count);
    else if (queries == QUERIES && dim == 128)
        SET(score_all)(QUERIES, 128, query, keys, at, count);
    else if (queries == QUERIES)
        SET(score_all)(QUERIES, dim, query, keys, at, count);
    else
        for (size_t q = 0; q < queries; q++)
            SET(score_all)(1, dim, query + q, keys, at, count);
}

/* Scores become weights. There is room for them up to a multiple of WIDE. */
static TARGET void SET(weigh)(struct query *query, size_t count, float scale) {
    const size_t end = (count + WIDE - 1) / WIDE * WIDE;
    float *scores = query->scores, lanes[LANES], most = scores[0], sums[4];
    FLOATS highest = SPREAD(most), columns[4][COLUMNS];
    for (size_t j = count; j < end; j++) scores[j] = most;
    for (size_t j = 0; j < end; j += LANES) highest = SET(larger)(highest, LOAD(scores + j));
    STORE(lanes, highest);
    for (int i = 0; i < LANES; i++) most = lanes[i] > most ? lanes[i] : most;
    for (size_t j = 0; j < end; j += LANES)
        STORE(scores + j,
              SET(exponential)((LOAD(scores + j) - SPREAD(most)) * SPREAD(scale)));
    for (size_t j = count; j < end; j++) scores[j] = 0.0f;
    UNROLL for (int i = 0; i < 4; i++)
        UNROLL for (int v = 0; v < COLUMNS; v++) columns[i][v] = SPREAD(0.0f);
    for (size_t j = 0; j < end; j += WIDE)
        UNROLL for (int v = 0; v < COLUMNS; v++)
            columns[0][v] = columns[0][v] + LOAD(scores + j + v * LANES);
    SET(sum_each)(columns, sums);
    query->share = 1.0f / sums[0];
}

static inline __attribute__((always_inline)) TARGET void SET(add_chunk)(
    const int queries, const int width, const struct query *query, const float *const *values,
    size_t at, size_t count, size_t first) {
    FLOATS sums[QUERIES][CHUNK / LANES];
    UNROLL for (int q = 0; q < queries; q++)
        UNROLL for (int v = 0; v < width / LANES; v++)
            sums[q][v] = LOAD(query[q].out + first + v * LANES);
    for (size_t j = 0; j < count; j++)
        UNROLL for (int v = 0; v < width / LANES; v++) {
            FLOATS value = LOAD(values[j] + first + v * LANES);
            UNROLL for (int q = 0; q < queries; q++)
                sums[q][v] = ADD_PRODUCT(sums[q][v], SPREAD(query[q].scores[at + j]), value);
        }
    UNROLL for (int q = 0; q < queries; q++)
        UNROLL for (int v = 0; v < width / LANES; v++)
            STORE(query[q].out + first + v * LANES, sums[q][v]);
}

static TARGET void SET(add_rest)(const struct query *query, size_t dim,
                                 const float *const *values, size_t at, size_t count,
                                 size_t first) {
    FLOATS sums = SET(load_rest)(query->out, first, dim);
    for (size_t j = 0; j < count; j++)
        sums = ADD_PRODUCT(sums, SPREAD(query->scores[at + j]),
                           SET(load_rest)(values[j], first, dim));
    SET(store_rest)(query->out, first, dim, sums);
}

static inline __attribute__((always_inline)) TARGET void SET(add_all)(
    const int queries, const struct query *query, size_t dim, const float *const *values,
    size_t at, size_t count) {
    size_t first = 0;
    for (; first + CHUNK <= dim; first += CHUNK)
        SET(add_chunk)(queries, CHUNK, query, values, at, count, first);
    for (; first + LANES <= dim; first += LANES)
        SET(add_chunk)(queries, LANES, query, values, at, count, first);
    for (int q = 0; q < queries && first < dim; q++)
        SET(add_rest)(query + q, dim, values, at, count, first);
}

/* Adds values, each by its weight. */
static TARGET void SET(add)(const struct query *query, size_t queries, size_t dim,
                            const float *const *values, size_t at, size_t count) {
    if (queries == QUERIES)
        SET(add_all)(QUERIES, query, dim, values, at, count);
    else
        for (size_t q = 0; q < queries; q++) SET(add_all)(1, query + q, dim, values, at, count);
}

static const struct instruction_set SET(set) = {QUERIES, SET(score), SET(weigh), SET(add)};

#undef COLUMNS
#undef CHUNK
#undef QUERIES
