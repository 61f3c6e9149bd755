/* Rows times a weight matrix that is kept in panels, on a CPU.

   A panel holds the weights of 32 outputs: [inputs][32], so that one pass over memory serves one
   row or many. Weights are float32, or bfloat16, which becomes float32 by a shift. A 32-bit word
   of a bfloat16 panel holds outputs j and j + 16 in its low and high half: either is one operation
   away from a vector of floats.

   Every sum runs over the inputs in order, one step at a time, from zero. So a row's result depends
   neither on the rows beside it nor on the number of threads, and weights of bfloat16 give the bits
   that the same weights give as float32. Sets of instructions that fuse product and sum agree, too.

   Threads are those of the OpenMP runtime that the caller names: torch's own, so that no two pools
   fight for the cores.
*/

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "threads.h"

#define PANEL 32          /* outputs */
#define GROUP 4           /* panels that a thread takes at a time */
#define BLOCK_INPUTS 256  /* of a panel, that stay in a cache while many rows pass */
#define BLOCK_ROWS 256    /* at most, that pass the weights together and stay in a cache, too */
#define TILE_ROWS 14      /* of any instruction set, at most */
#define AHEAD 2048        /* bytes of a panel that are fetched early */
#define SERIAL 65536      /* products of numbers: fewer are not worth waking a thread */
#define LARGE_PAGE ((uintptr_t)2 << 20)

typedef void (*tile_function)(const float *x, const char *w, float *y, size_t inputs,
                              size_t stride, int goes_on);

struct instruction_set {
    size_t most_rows, whole_rows;
    tile_function tiles[TILE_ROWS + 1][2]; /* [rows][is bfloat16] */
};

#define SET_BODY "panels_tiles.h"
#include "instruction_sets.h"

const void *panels_set(const char *name) { return find_set(name); }

struct job {
    const struct instruction_set *set;
    const float *x; /* [rows][inputs] */
    float *tiles;   /* the same, tile by tile: [inputs][rows of the tile] */
    const char *w;
    float *y; /* [rows][outputs] */
    size_t rows, outputs, inputs, panels, group, item;
    const char *source; /* what is packed: [rows][inputs] */
    char *packed;
    size_t first; /* output that its first row is */
};

/* Rows are dealt out evenly to as few tiles as can be. */

static size_t count_tiles(const struct job *job) {
    return (job->rows + job->set->most_rows - 1) / job->set->most_rows;
}

static size_t first_row(const struct job *job, size_t tile) {
    size_t tiles = count_tiles(job), more = job->rows % tiles;
    return tile * (job->rows / tiles) + (tile < more ? tile : more);
}

static void copy_tile(const void *about, size_t tile) {
    const struct job *job = about;
    size_t begin = first_row(job, tile), rows = first_row(job, tile + 1) - begin;
    const float *x = job->x + begin * job->inputs;
    float *to = job->tiles + begin * job->inputs;
    for (size_t i = 0; i < job->inputs; i++)
        for (size_t r = 0; r < rows; r++) *to++ = x[r * job->inputs + i];
}

/* One panel, some of its inputs, one tile of rows. The last panel may be wider than the result. */
static void multiply_tile(const struct job *job, size_t panel, size_t begin, size_t inputs,
                          size_t tile) {
    size_t row = first_row(job, tile), rows = first_row(job, tile + 1) - row;
    size_t left = job->outputs - panel * PANEL, width = left < PANEL ? left : PANEL;
    const float *x = job->tiles + row * job->inputs + begin * rows;
    const char *w = job->w + (panel * job->inputs + begin) * PANEL * job->item;
    float *y = job->y + row * job->outputs + panel * PANEL;
    tile_function multiply = job->set->tiles[rows][job->item == sizeof(uint16_t)];
    if (width == PANEL) {
        multiply(x, w, y, inputs, job->outputs, begin > 0);
        return;
    }
    float edge[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    for (size_t r = 0; begin > 0 && r < rows; r++)
        memcpy(edge + r * PANEL, y + r * job->outputs, width * sizeof(float));
    multiply(x, w, edge, inputs, PANEL, begin > 0);
    for (size_t r = 0; r < rows; r++)
        memcpy(y + r * job->outputs, edge + r * PANEL, width * sizeof(float));
}

/* Some panels, all rows. Where a panel is read once, it is read from end to end. */
static void multiply_group(const void *about, size_t group) {
    const struct job *job = about;
    size_t first = group * job->group, last = first + job->group;
    size_t tiles = count_tiles(job);
    if (last > job->panels) last = job->panels;
    if (job->rows <= job->set->whole_rows) {
        for (size_t panel = first; panel < last; panel++)
            multiply_tile(job, panel, 0, job->inputs, 0);
        return;
    }
    for (size_t begin = 0; begin < job->inputs; begin += BLOCK_INPUTS) {
        size_t left = job->inputs - begin, inputs = left < BLOCK_INPUTS ? left : BLOCK_INPUTS;
        for (size_t tile = 0; tile < tiles; tile++)
            for (size_t panel = first; panel < last; panel++)
                multiply_tile(job, panel, begin, inputs, tile);
    }
}

/* Fewer panels at a time where there would be too few turns for all threads. */
static size_t group_size(size_t panels, unsigned threads) {
    size_t group = panels / (4 * (size_t)threads);
    return group < 1 ? 1 : group > GROUP ? GROUP : group;
}

/* y [rows, outputs] = x [rows, inputs] times the transpose of the weight, whose panels begin at w.
   ITEM: bytes of a weight. PARALLEL: GOMP_parallel, or NULL. Returns 0, or -1 without memory. */
int panels_multiply(const void *set, omp_parallel parallel, unsigned threads, const float *x,
                    const char *w, float *y, size_t rows, size_t outputs, size_t inputs,
                    size_t item) {
    size_t panels = (outputs + PANEL - 1) / PANEL;
    size_t blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    size_t most = blocks ? (rows + blocks - 1) / blocks : 0;
    if (rows * outputs * inputs < SERIAL) threads = 1;
    float *room = most > 1 ? malloc(most * inputs * sizeof(float)) : NULL;
    if (most > 1 && room == NULL) return -1;
    for (size_t begin = 0; begin < rows; begin += most) {
        struct job job = {
            .set = set, .x = x + begin * inputs, .w = w, .y = y + begin * outputs,
            .rows = rows - begin < most ? rows - begin : most, .outputs = outputs,
            .inputs = inputs, .panels = panels, .group = group_size(panels, threads), .item = item,
        };
        job.tiles = job.rows > 1 ? room : (float *)job.x; /* one row is its own tile */
        if (job.rows > 1) run_units(copy_tile, &job, count_tiles(&job), parallel, threads);
        size_t groups = (panels + job.group - 1) / job.group;
        run_units(multiply_group, &job, groups, parallel, threads);
    }
    free(room);
    return 0;
}

/* Packing */

/* Where an output stands in its panel. */
static size_t place_of(size_t lane, size_t item) {
    return item == sizeof(float) ? lane : lane % (PANEL / 2) * 2 + lane / (PANEL / 2);
}

static void pack_row(const struct job *job, char *panel, size_t lane, size_t row, size_t begin,
                     size_t end) {
    size_t place = place_of(lane, job->item);
    if (job->item == sizeof(float)) {
        const float *from = (const float *)job->source + row * job->inputs;
        for (size_t i = begin; i < end; i++) ((float *)panel)[i * PANEL + place] = from[i];
    } else {
        const uint16_t *from = (const uint16_t *)job->source + row * job->inputs;
        for (size_t i = begin; i < end; i++) ((uint16_t *)panel)[i * PANEL + place] = from[i];
    }
}

/* Those of the rows that belong to one panel. */
static void pack_panel(const void *about, size_t number) {
    const struct job *job = about;
    size_t panel = job->first / PANEL + number, begin = panel * PANEL, end = begin + PANEL;
    char *to = job->packed + panel * job->inputs * PANEL * job->item;
    if (begin < job->first) begin = job->first;
    if (end > job->first + job->rows) end = job->first + job->rows;
    for (size_t i = 0; i < job->inputs; i += BLOCK_INPUTS) {
        size_t last = i + BLOCK_INPUTS < job->inputs ? i + BLOCK_INPUTS : job->inputs;
        for (size_t output = begin; output < end; output++)
            pack_row(job, to, output % PANEL, output - job->first, i, last);
    }
}

/* Rows [rows][inputs] become the outputs from FIRST on. */
void panels_pack(omp_parallel parallel, unsigned threads, const char *source, char *packed,
                 size_t first, size_t rows, size_t inputs, size_t item) {
    struct job job = {
        .source = source, .packed = packed, .first = first, .rows = rows, .inputs = inputs,
        .item = item,
    };
    if (rows == 0) return;
    size_t panels = (first + rows - 1) / PANEL - first / PANEL + 1;
    run_units(pack_panel, &job, panels, parallel, threads);
}

/* Asks for large pages, of which fewer have to be looked up; to be called before the first write. */
void panels_use_large_pages(void *memory, size_t bytes) {
#ifdef MADV_HUGEPAGE
    uintptr_t begin = ((uintptr_t)memory + LARGE_PAGE - 1) & ~(LARGE_PAGE - 1);
    uintptr_t end = ((uintptr_t)memory + bytes) & ~(LARGE_PAGE - 1);
    if (begin < end) madvise((void *)begin, end - begin, MADV_HUGEPAGE);
#else
    (void)memory, (void)bytes;
#endif
}
