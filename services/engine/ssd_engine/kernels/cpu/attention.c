/* Attention over a paged cache of float32, on a CPU.

   A row is a function of its query and of the keys and values that it sees: its bits depend neither
   on the rows beside it, nor on where pages lie, nor on the number of threads, nor on whether its
   keys are its sequence's or a branch's. So a text that is read again after a failure, verified in
   other pieces or decoded beside others gets the same numbers. Sets of instructions that fuse
   product and sum agree, too.

   A unit of work is some rows of one sequence and one KV head: the scores of all that they see are
   kept, tile by tile of keys; then come the weights, and the values likewise.
*/

#include "attention.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "threads.h"

#define SERIAL 65536 /* products of numbers: fewer are not worth waking a thread */

static size_t at_most(size_t count, size_t limit) { return count < limit ? count : limit; }

#define SET_BODY "attention_rows.h"
#include "instruction_sets.h"

const void *attention_set(const char *name) { return find_set(name); }

static const float *place_of(const struct attention *a, const float *cache, size_t slot,
                             size_t kv_head) {
    return cache + (slot * a->kv_heads + kv_head) * a->dim;
}

/* Takes some queries past a tile of a sequence's keys, or values: together as far as all of them
   see, then each by itself. */
static void pass_tile(const struct attention *a, pass step, const struct query *query,
                      size_t queries, const float *const *places, size_t begin) {
    size_t all = TILE_KEYS, together = a->set->queries;
    for (size_t q = 0; q < queries; q++) {
        size_t sees = query[q].seen > begin ? query[q].seen - begin : 0;
        if (sees < all) all = sees;
    }
    if (queries < together) all = 0;
    step(query, queries, a->dim, places, begin, all);
    for (size_t q = 0; q < queries; q++)
        if (query[q].seen > begin + all)
            step(query + q, 1, a->dim, places + all, begin + all,
                 at_most(query[q].seen - begin, TILE_KEYS) - all);
}

/* Takes all queries of a unit past the keys, or values, of their sequence. */
static void pass_sequence(const struct attention *a, const struct unit *unit, size_t kv_head,
                          pass step, const float *cache, const struct query *query,
                          size_t queries, size_t longest) {
    const int32_t *table = a->blocks + unit->blocks;
    const float *places[TILE_KEYS];
    for (size_t begin = 0; begin < longest; begin += TILE_KEYS) {
        for (size_t at = begin; at < begin + TILE_KEYS && at < longest; at++) {
            size_t slot = (size_t)table[at / a->block_size] * a->block_size + at % a->block_size;
            places[at - begin] = place_of(a, cache, slot, kv_head);
        }
        for (size_t q = 0; q < queries; q += a->set->queries)
            pass_tile(a, step, query + q, at_most(queries - q, a->set->queries), places, begin);
    }
}

/* Takes one query past the keys, or values, of its own branch. */
static void pass_branch(const struct attention *a, const struct unit *unit, size_t kv_head,
                        pass step, const float *cache, const struct query *query) {
    const float *places[TILE_KEYS];
    for (size_t begin = 0; begin < (size_t)unit->most; begin += TILE_KEYS) {
        size_t count = at_most((size_t)unit->most - begin, TILE_KEYS);
        for (size_t j = 0; j < count; j++)
            places[j] = place_of(a, cache, (size_t)query->branch[begin + j], kv_head);
        step(query, 1, a->dim, places, query->seen + begin, count);
    }
}

static void attend(const struct attention *a, const struct unit *unit, size_t kv_head,
                   struct query *query, size_t queries, size_t longest) {
    pass score = a->set->score, add = a->set->add;
    pass_sequence(a, unit, kv_head, score, a->keys, query, queries, longest);
    for (struct query *q = query; q < query + queries; q++) {
        pass_branch(a, unit, kv_head, score, a->keys, q);
        a->set->weigh(q, q->seen + (size_t)unit->most, a->scale);
        memset(q->out, 0, a->dim * sizeof(float));
    }
    pass_sequence(a, unit, kv_head, add, a->values, query, queries, longest);
    for (struct query *q = query; q < query + queries; q++) {
        pass_branch(a, unit, kv_head, add, a->values, q);
        for (size_t i = 0; i < a->dim; i++) q->out[i] *= q->share;
    }
}

struct turn {
    const struct attention *about;
    atomic_int *failed;
};

/* All query heads of a unit's rows that share a KV head. */
static void attend_unit(const void *given, size_t number) {
    const struct turn *turn = given;
    const struct attention *a = turn->about;
    const struct unit *unit = a->units + number / a->kv_heads;
    const size_t kv_head = number % a->kv_heads, group = a->heads / a->kv_heads;
    const size_t queries = (size_t)unit->rows * group, most = (size_t)unit->most;
    size_t longest = 0;
    for (size_t row = 0; row < (size_t)unit->rows; row++) {
        size_t seen = (size_t)a->visible[unit->first + (int64_t)row];
        if (seen > longest) longest = seen;
    }
    const size_t room = (longest + most + WIDE - 1) / WIDE * WIDE;
    struct query *query = malloc(queries * (sizeof(struct query) + room * sizeof(float)));
    if (query == NULL) {
        atomic_store(turn->failed, 1);
        return;
    }
    for (size_t q = 0; q < queries; q++) {
        size_t row = q / group, at = (size_t)unit->first + row;
        size_t place = (at * a->heads + kv_head * group + q % group) * a->dim;
        query[q] = (struct query){
            .in = a->query + place, .out = a->out + place,
            .scores = (float *)(query + queries) + q * room, .seen = (size_t)a->visible[at],
            .branch = a->branch + unit->branch + row * most,
        };
    }
    attend(a, unit, kv_head, query, queries, longest);
    free(query);
}

/* WORK: how many positions all rows see together. Returns 0, or -1 without memory. */
int attend_rows(const void *set, omp_parallel parallel, unsigned threads, const float *query,
                const float *keys, const float *values, float *out, const int64_t *units,
                size_t num_units, const int32_t *blocks, const int32_t *visible,
                const int32_t *branch, size_t heads, size_t kv_heads, size_t dim,
                size_t block_size, float scale, size_t work) {
    struct attention about = {
        .set = set, .query = query, .keys = keys, .values = values, .out = out,
        .units = (const struct unit *)units, .blocks = blocks, .visible = visible,
        .branch = branch, .heads = heads, .kv_heads = kv_heads, .dim = dim,
        .block_size = block_size, .scale = scale,
    };
    atomic_int failed = 0;
    struct turn turn = {&about, &failed};
    if (work * heads * dim < SERIAL) threads = 1;
    run_units(attend_unit, &turn, num_units * kv_heads, parallel, threads);
    return atomic_load(&failed) ? -1 : 0;
}
