/* Attention of rows over a paged cache: what one call is about. */

#pragma once
#include <stddef.h>
#include <stdint.h>

#define WIDE 16      /* floats whose sums go side by side, whatever the vectors are */
#define TILE_KEYS 64 /* that stay in a cache while the queries of a unit pass */

/* Some rows of one sequence. */
struct unit {
    int64_t first, rows;  /* of the flat batch */
    int64_t blocks;       /* where its table begins */
    int64_t branch, most; /* where the slots of its branches begin; how many each row has */
};

struct attention {
    const struct instruction_set *set;
    const float *query;         /* [rows][heads][dim] */
    const float *keys, *values; /* [slots][kv_heads][dim] */
    float *out;                 /* [rows][heads][dim] */
    const struct unit *units;
    const int32_t *blocks;  /* tables, one after another */
    const int32_t *visible; /* [rows]: how many positions of its sequence a row sees */
    const int32_t *branch;  /* slots that rows see after these: [rows of a unit][most] */
    size_t heads, kv_heads, dim, block_size;
    float scale;
};

/* One head of one row. */
struct query {
    const float *in;
    float *out;
    float *scores; /* of the positions that it sees, then of its branch; weights, later */
    size_t seen;   /* positions */
    const int32_t *branch;
    float share; /* one over the sum of all weights */
};

typedef void (*pass)(const struct query *query, size_t queries, size_t dim,
                     const float *const *places, size_t at, size_t count);

struct instruction_set {
    size_t queries; /* that are best passed together */
    pass score;     /* of keys: their scores, from number AT on */
    void (*weigh)(struct query *query, size_t count, float scale);
    pass add; /* values, each by its weight */
};
