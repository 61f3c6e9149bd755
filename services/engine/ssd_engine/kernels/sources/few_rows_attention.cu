// Attention of a few rows per sequence over its paged cache, from the projection to what the output
// projection takes: QK-norm, rotary embedding, the new keys and values into their slots, attention.
//
// A cluster of CLUSTER blocks serves one KV head of one run. Tiles of keys are dealt out to its
// blocks in turn, by their position alone; a tree's tail is divided among them. Warpgroups divide
// the rows of a block, 64 each, and the keys of every tile; each keeps an online softmax of its own.
// At the end the sums of a row go to the block of the cluster that adds them up, in a fixed order.
// What a row does not see adds exactly nothing: its result depends on its own limit and on nothing
// else.
//
// Between blocks memory is slow: sums travel as halves, next to the power of two that makes their
// largest about 1.
//
// Warps of their own ask for the keys that other steps have written, page by page, from the copy
// engine, as soon as there is room. Those of this step they compute from the projection, in every
// block that needs them; their own run's blocks write them. What a page holds beyond the end of its
// sequence, perhaps no numbers, is not seen, and of the values nothing is left.
//
// Queries, keys and values lie in panels of 64 dimensions, whose rows of 128 bytes are swizzled as
// wgmma takes them: the second operand of both products straight from there, the weights of the
// values from the registers in which they were computed.
//
// Compiled for: HEADS, KV_HEADS, DIM (64 or 128), PAGE (tokens of a block of the cache), ROWS (of a
// run times heads of a group, a multiple of 16 up to 128), KEY_GROUPS (warpgroups that divide the
// keys of a tile: 1 or 2), STAGES (tiles in shared memory), CLUSTER, TABLE and SCRATCH (widths),
// TREE, NORM.
//
// It is so short that fetching its instructions counts: loops are unrolled only where registers are
// at stake.

#define GROUP (HEADS / KV_HEADS)
#define TILE 64
#define ROW_GROUPS ((ROWS + 63) / 64)
#define WARPS (ROW_GROUPS * KEY_GROUPS * 4)  // that compute
#define ASKERS 4                              // more warps, which ask
#define THREADS (WARPS * 32)
#define KEYS (TILE / KEY_GROUPS)  // of a tile, of a warpgroup
#define PANELS (DIM / 64)
#define PANEL (TILE * 8)                    // of keys or values, in 16 bytes
#define QUERY_PANEL (ROW_GROUPS * 64 * 8)  // likewise
#define STAGE (2 * PANELS * PANEL)
#define OWN_DIMS (DIM / KEY_GROUPS)  // that a warpgroup adds up for its rows
#define GIVEN_STRIDE (DIM / 2 + 8)
#define SUM_WORDS (DIM / 2 + 4)  // of a row: peak, total and scales of its halves, then sums
#define MESSAGE (SHARE * SUM_WORDS * 4)  // bytes from a block to another one
#define PAGES (TILE / PAGE)  // of a tile
#define OUTSIDE (1 << 30)  // a slot that no cache has: what is copied from there is zero
#define PIECES (DIM / 8)  // of 16 bytes, of a vector
#define LANES (PIECES / 2)  // that share a vector
#define VECTORS ((ROWS * LANES + THREADS - 1) / THREADS)  // of the query, that a thread helps with
#define SHARE ((ROWS + CLUSTER - 1) / CLUSTER)  // rows that a block adds up
#define NEVER (-1e30f)

static_assert(CLUSTER * SHARE == ROWS, "every block adds up as many rows");
static_assert(PAGES <= ASKERS, "a warp asks for one page of a tile");
static_assert(KEY_GROUPS * ROWS * GIVEN_STRIDE * 4 <= STAGES * STAGE * 16, "sums take the tiles' room");

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Of what no kernel of the step writes: loaded where it stands, not where it is used.
__device__ __forceinline__ uint4 early(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ void copy_piece(uint4* to, const uint4* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(to)), "l"(from)
                 : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ u32 to_halves(float lower, float upper) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(upper), "f"(lower));
    return pair;
}

__device__ __forceinline__ float2 of_halves(u32 pair) {
    float2 v;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(v.x), "=f"(v.y) : "r"(pair));
    return v;
}

// Of the warps that compute.
__device__ __forceinline__ void meet() {
    asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

// What this thread wrote to shared memory can be read by matrix instructions after a barrier.
__device__ __forceinline__ void let_products_read() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// s (+)= queries * keys, 16 dimensions of both.
__device__ __forceinline__ void score(float (&s)[KEYS / 8][4], const u32 (&q)[4], u64 keys,
                                      int add) {
#if KEYS == 32
    asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k16"
                 ".f32.bf16.bf16 {" IN_16 "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
                 : SIXTEEN(s, 0)
                 : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(keys), "r"(add));
#else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k16"
                 ".f32.bf16.bf16 {" IN_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
                 : SIXTEEN(s, 0), SIXTEEN(s, 4)
                 : "r"(q[0]), "r"(q[1]), "r"(q[2]), "r"(q[3]), "l"(keys), "r"(add));
#endif
}

// o += weights * values, of 16 keys.
__device__ __forceinline__ void weigh(float (&o)[DIM / 8][4], const u32 (&w)[4], u64 values) {
#if DIM == 64
    asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16"
                 ".f32.bf16.bf16 {" IN_32 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;}"
                 : SIXTEEN(o, 0), SIXTEEN(o, 4)
                 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(values));
#else
    asm volatile("{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n128k16"
                 ".f32.bf16.bf16 {" IN_64 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;}"
                 : SIXTEEN(o, 0), SIXTEEN(o, 4), SIXTEEN(o, 8), SIXTEEN(o, 12)
                 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(values));
#endif
}

// Where 16 bytes of a panel's row lie.
__device__ __forceinline__ int placed(int row, int piece) { return row * 8 + (piece ^ row % 8); }

// Where a piece of a whole vector lies, in panels of that size.
__device__ __forceinline__ int placed_in(int panel, int row, int piece) {
    return piece / 8 * panel + placed(row, piece % 8);
}

// 64 dimensions of one head, of a page's tokens.
__device__ __forceinline__ void copy_page(uint4* to, const Map* cache, int dim, int head, int slot,
                                          u64* landed) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(address(to)), "l"(cache), "r"(dim),
                 "r"(head), "r"(slot), "r"(address(landed)) : "memory");
}

// To a block of the cluster, whose barrier is told.
__device__ __forceinline__ void send(u32 to, const void* from, int bytes, u32 landed) {
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to), "r"(address(from)), "r"(bytes), "r"(landed)
                 : "memory");
}

// A lane's part of a vector: a piece of its first half, and the one opposite of its second.
struct Part {
    u32 first[4], second[4];
};

__device__ __forceinline__ Part part_at(const uint4* vector, int piece) {
    const uint4 a = __ldcg(vector + piece), b = __ldcg(vector + LANES + piece);
    return {{a.x, a.y, a.z, a.w}, {b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ uint4 piece_of(const u32 (&words)[4]) {
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// Cosines and sines of one position; both halves of a vector turn by the same angles.
struct Angles {
    uint4 cosine, sine;
};

__device__ __forceinline__ Angles angles_at(const uint4* cosine, const uint4* sine, int position,
                                            int piece) {
    const long at = (long)position * PIECES + LANES + piece;
    return {early(cosine + at), early(sine + at)};
}

__device__ __forceinline__ void turn(Part& v, const uint4* norm, const Angles& angles, float eps,
                                     int piece) {
    const uint4 c = angles.cosine, s = angles.sine;
    const u32 cosines[4] = {c.x, c.y, c.z, c.w}, sines[4] = {s.x, s.y, s.z, s.w};
#if NORM
    const uint4 n0 = __ldg(norm + piece), n1 = __ldg(norm + LANES + piece);
    const u32 first_norm[4] = {n0.x, n0.y, n0.z, n0.w}, second_norm[4] = {n1.x, n1.y, n1.z, n1.w};
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < 4; i++)
        squares += low(v.first[i]) * low(v.first[i]) + high(v.first[i]) * high(v.first[i]) +
                   low(v.second[i]) * low(v.second[i]) + high(v.second[i]) * high(v.second[i]);
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    const float scale = rsqrtf(squares * (1.f / DIM) + eps);
#endif
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float a0 = low(v.first[i]), a1 = high(v.first[i]);
        float b0 = low(v.second[i]), b1 = high(v.second[i]);
#if NORM
        a0 *= scale * low(first_norm[i]), a1 *= scale * high(first_norm[i]);
        b0 *= scale * low(second_norm[i]), b1 *= scale * high(second_norm[i]);
#endif
        const float c0 = low(cosines[i]), c1 = high(cosines[i]);
        const float s0 = low(sines[i]), s1 = high(sines[i]);
        v.first[i] = pack(a0 * c0 - b0 * s0, a1 * c1 - b1 * s1);
        v.second[i] = pack(b0 * c0 + a0 * s0, b1 * c1 + a1 * s1);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS + ASKERS * 32, 1)
few_rows_attention(const uint4* projected,             // [rows][HEADS + 2 * KV_HEADS][DIM]
                   const uint4* __restrict__ norm,     // [HEADS + KV_HEADS][DIM]
                   const uint4* __restrict__ cosine,   // [positions][DIM]
                   const uint4* __restrict__ sine,     // likewise; negated in its first half
                   uint4* key, uint4* value,           // [slots][KV_HEADS][DIM]
                   u16* out,                           // [rows][HEADS][DIM]
                   const int* __restrict__ positions,  // [rows]
                   const int* __restrict__ slots, const int* __restrict__ limits,
                   const int* __restrict__ branches,
                   const int* __restrict__ run_begin,  // [runs]
                   const int* __restrict__ run_rows, const int* __restrict__ run_end,
                   const int* __restrict__ run_new,     // positions from here on are of this step,
                   const int* __restrict__ run_source,  // in rows from here on
                   const int* __restrict__ run_branches, const int* __restrict__ run_depths,
                   const int* __restrict__ tables, const int* __restrict__ scratch, float scale,
                   float eps, const __grid_constant__ Map key_map,
                   const __grid_constant__ Map value_map) {
    extern __shared__ __align__(1024) uint4 shared[];
    uint4* queries = shared;                                  // [PANELS][QUERY_PANEL]
    uint4* stages = queries + PANELS * QUERY_PANEL;           // [STAGES][STAGE]
    float* given = (float*)stages;                            // [KEY_GROUPS][ROWS][GIVEN_STRIDE]
    u32* sums = (u32*)(stages + STAGES * STAGE);              // [ROWS][SUM_WORDS]
    u32* inbox = sums + ROWS * SUM_WORDS;                     // [CLUSTER][SHARE][SUM_WORDS]
    float2* peaks = (float2*)(inbox + CLUSTER * SHARE * SUM_WORDS);  // [KEY_GROUPS][ROWS]
    u64* landed = (u64*)(peaks + KEY_GROUPS * ROWS);          // [STAGES]
    u64* emptied = landed + STAGES;                           // [STAGES]
    u64* unfinished = emptied + STAGES;                       // tiles in which something is missing
    u64* received = unfinished + 1;
    const int rank = blockIdx.x % CLUSTER, kv_head = blockIdx.x / CLUSTER, run = blockIdx.y;
    const int warp = threadIdx.x / 32, asker = warp - WARPS;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_group = warp / 4 % ROW_GROUPS, key_group = warp / 4 / ROW_GROUPS;
    const int line = row_group * 64 + warp % 4 * 16 + g;  // and the one 8 below it
    const bool in_use = line - g < ROWS;                  // of all lines of a warp
    let_next_begin();
    if (asker >= 0 && lane == 0) look_at(asker % 2 ? &value_map : &key_map);

    // What is read before the wait was written before the first kernel of this step.
    const int end = run_end[run], begin = run_begin[run], count = run_rows[run];
    const int fresh = run_new[run], source = run_source[run];
    const int shared_tiles = (end + TILE - 1) / TILE;
    const int own_shared = (shared_tiles - rank + CLUSTER - 1) / CLUSTER;
    int own_tiles = own_shared;
#if TREE
    const int num_branches = max(1, run_branches[run]), tail = num_branches * run_depths[run];
    const int fresh_tail = tail - num_branches;  // slots from here on are of this step
    const int tail_share = min(TILE, (tail + CLUSTER - 1) / CLUSTER);
    const int tail_tiles = tail ? (tail + tail_share - 1) / tail_share : 0;
    const float per_branch = 1.f / num_branches;
    own_tiles += (tail_tiles - rank + CLUSTER - 1) / CLUSTER;
#endif
    if (!count || !end) {
        wait_for_previous();
        return;
    }
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; s++)
            make_landing(landed + s, ASKERS), make_landing(emptied + s, WARPS);
        make_landing(unfinished, ASKERS);
        make_landing(received, 1);
        show_landings();
        expect(received, (CLUSTER - 1) * MESSAGE);
    }
    arrive();  // nothing is sent to a block before it is there
    __syncthreads();

    const int piece = lane % LANES;
    if (asker >= 0) {
        // What earlier steps have written, and whatever else lies in those pages.
        auto ask = [&](int i, int stage, int page, u64* there) {
            const int number = (rank + i * CLUSTER) * PAGES + asker;
            if (lane) return;
            if (asker >= PAGES) return arrive_at(there);
            expect(there, STAGE * 16 / PAGES);
            const int slot = number * PAGE < end ? page * PAGE : OUTSIDE;
            uint4* to = stages + stage * STAGE + asker * PAGE * 8;
#pragma unroll
            for (int c = 0; c < 2 * PANELS; c++)
                copy_page(to + c * PANEL, c < PANELS ? &key_map : &value_map, c % PANELS * 64,
                          kv_head, slot, there);
        };

        // The same of a tail, whose slots lie anywhere. What lies beyond it is zero.
        auto ask_tail = [&](int i, int stage) {
#if TREE
            const int first = (rank + (i - own_shared) * CLUSTER) * tail_share;
            const int to = min(tail, first + tail_share);
#pragma unroll 4
            for (int q = 0; q < TILE * PIECES / (ASKERS * 32); q++) {
                const int p = q * ASKERS * 32 + (int)threadIdx.x - THREADS, k = p / PIECES;
                uint4* there = stages + stage * STAGE + placed_in(PANEL, k, p % PIECES);
                if (first + k >= to) {
                    there[0] = there[PANELS * PANEL] = make_uint4(0, 0, 0, 0);
                } else if (first + k < fresh_tail) {
                    const long slot = __ldg(scratch + run * SCRATCH + first + k);
                    const long at = (slot * KV_HEADS + kv_head) * PIECES + p % PIECES;
                    copy_piece(there, key + at), copy_piece(there + PANELS * PANEL, value + at);
                }
            }
#endif
        };

        // What this step adds: from its projection, by one warp for each 32 / LANES keys. Values of
        // a page's tokens beyond the end are zero.
        auto compute = [&](int i, int stage) {
            int first = (rank + i * CLUSTER) * TILE, from = max(first, fresh);
            int to = min(first + TILE, end), row_of_0 = source - fresh;
            int page_end = min(first + TILE, (end + PAGE - 1) / PAGE * PAGE);
            bool ours = source == begin;  // to write
#if TREE
            if (i >= own_shared) {
                first = (rank + (i - own_shared) * CLUSTER) * tail_share;
                from = max(first, fresh_tail), to = min(tail, first + tail_share);
                row_of_0 = begin - fresh_tail, page_end = 0, ours = true;
            }
#endif
            uint4* keys = stages + stage * STAGE;
            for (int p = threadIdx.x - THREADS; p < (page_end - end) * PIECES; p += ASKERS * 32)
                keys[PANELS * PANEL + placed_in(PANEL, end - first + p / PIECES, p % PIECES)] =
                    make_uint4(0, 0, 0, 0);
#pragma unroll 1
            for (int at = from + asker * (32 / LANES); at < to; at += ASKERS * (32 / LANES)) {
                const int mine = min(at + lane / LANES, to - 1), k = mine - first;
                const int row = row_of_0 + mine;
                const uint4* here =
                    projected + ((long)row * (HEADS + 2 * KV_HEADS) + HEADS + kv_head) * PIECES;
                const Part v = part_at(here + KV_HEADS * PIECES, piece);
                Part turned = part_at(here, piece);
                const long slot = ((long)slots[row] * KV_HEADS + kv_head) * PIECES;
                turn(turned, norm + (HEADS + kv_head) * PIECES,
                     angles_at(cosine, sine, positions[row], piece), eps, piece);
                const int places[2] = {placed_in(PANEL, k, piece),
                                       placed_in(PANEL, k, LANES + piece)};
                const uint4 of_key[2] = {piece_of(turned.first), piece_of(turned.second)};
                const uint4 of_value[2] = {piece_of(v.first), piece_of(v.second)};
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    keys[places[half]] = of_key[half];
                    keys[PANELS * PANEL + places[half]] = of_value[half];
                    if (ours) {
                        key[slot + half * LANES + piece] = of_key[half];
                        value[slot + half * LANES + piece] = of_value[half];
                    }
                }
            }
        };

        auto page_of = [&](int i) {
            const int number = (rank + i * CLUSTER) * PAGES + asker;
            return number < TABLE ? __ldg(tables + run * TABLE + number) : 0;
        };
        int page = page_of(0), stage = 0, phase = 1, fresh_phase = 0;
#pragma unroll 1
        for (int i = 0; i < own_tiles; i++) {
            const int next = page_of(i + 1);
            const bool in_tail = i >= own_shared;
            const int tile_end = (rank + i * CLUSTER + 1) * TILE;
            const bool is_unfinished = in_tail || (fresh < end && tile_end > fresh) ||
                                       (end % PAGE && tile_end > end);
            if (i >= STAGES) wait_for_landing(emptied + stage, phase);
            if (in_tail)
                ask_tail(i, stage);
            else
                ask(i, stage, page, is_unfinished ? unfinished : landed + stage);
            if (is_unfinished) {
                wait_for_previous();
                if (!in_tail) wait_for_landing(unfinished, fresh_phase), fresh_phase ^= 1;
                compute(i, stage);
                wait_for_copies();
                let_products_read();
                __syncwarp();
                if (lane == 0) arrive_at(landed + stage);
            }
            page = next;
            if (++stage == STAGES) stage = 0, phase ^= 1;
        }
        wait_for_all();
        arrive();
        wait_for_all();
        return;
    }

    int limit[2], branch[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = begin + min((line + 8 * h) / GROUP, count - 1);
        limit[h] = min(limits[row], end - 1);
        branch[h] = TREE ? branches[row] : -1;
    }
    const int lowest = __reduce_min_sync(0xffffffffu, min(limit[0], limit[1]));
    Angles angles[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int l = (i * THREADS + (int)threadIdx.x) / LANES;
        angles[i] =
            angles_at(cosine, sine, positions[begin + min(l / GROUP, count - 1)], piece);
    }

    wait_for_previous();
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int l = (i * THREADS + (int)threadIdx.x) / LANES, head = kv_head * GROUP + l % GROUP;
        const int row = begin + min(l / GROUP, count - 1);
        Part v = part_at(projected + ((long)row * (HEADS + 2 * KV_HEADS) + head) * PIECES, piece);
        turn(v, norm + head * PIECES, angles[i], eps, piece);
        if (l < ROWS) {
            queries[placed_in(QUERY_PANEL, l, piece)] = piece_of(v.first);
            queries[placed_in(QUERY_PANEL, l, LANES + piece)] = piece_of(v.second);
        }
    }
    let_products_read();
    meet();
    u32 query[DIM / 16][4];
#pragma unroll
    for (int c = 0; c < DIM / 16; c++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            query[c][e] = ((u32*)(queries + placed_in(QUERY_PANEL, line + e % 2 * 8,
                                                      c * 2 + e / 2)))[t];

    float m[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f};
    float o[DIM / 8][4] = {};
    int stage = 0, phase = 0;
#pragma unroll 1
    for (int i = 0; i < own_tiles; i++) {
        wait_for_landing(landed + stage, phase);
        const uint4* keys = stages + stage * STAGE + key_group * KEYS * 8;
        const uint4* values = keys + PANELS * PANEL;

        float s[KEYS / 8][4];
        begin_products();
#pragma unroll
        for (int c = 0; c < DIM / 16; c++)
            score(s, query[c], operand(keys + c / 4 * PANEL + c % 4 * 2, 0), c > 0);
        end_products();
        wait_for_products();

        // What a row sees: up to its bound, and in the tail only its own branch.
        int first = (rank + i * CLUSTER) * TILE, bound[2] = {limit[0], limit[1]};
#if TREE
        const bool in_tail = i >= own_shared;
        if (in_tail) {
            first = (rank + (i - own_shared) * CLUSTER) * tail_share;
            bound[0] = bound[1] = min(tail, first + tail_share) - 1;
        }
#else
        const bool in_tail = false;
#endif
        if (in_tail || first + TILE - 1 > lowest) {
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int at = first + key_group * KEYS + j * 8 + 2 * t + e;
#if TREE
                    const int whose = at - num_branches * (int)((at + 0.5f) * per_branch);
#endif
#pragma unroll
                    for (int h = 0; h < 2; h++) {
#if TREE
                        const bool sees = (at <= bound[h]) & (!in_tail | (whose == branch[h]));
#else
                        const bool sees = at <= bound[h];
#endif
                        s[j][2 * h + e] = sees ? s[j][2 * h + e] : NEVER;
                    }
                }
        }
        // A row that has seen nothing yet keeps its weights at 0.
        u32 weights[KEYS / 16][4];
        float keep[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float highest = s[0][2 * h];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++)
                highest = fmaxf(highest, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            highest = fmaxf(m[h], highest == NEVER ? NEVER : highest * scale);
            const float base = highest == NEVER ? 0.f : highest;
            keep[h] = power_of_2(m[h] - base);
            m[h] = highest;
            total[h] *= keep[h];
#pragma unroll
            for (int j = 0; j < KEYS / 8; j++) {
                const float w0 = power_of_2(fmaf(s[j][2 * h], scale, -base));
                const float w1 = power_of_2(fmaf(s[j][2 * h + 1], scale, -base));
                total[h] += w0 + w1;
                weights[j / 2][j % 2 * 2 + h] = pack(w0, w1);
            }
        }
        if (__any_sync(0xffffffffu, keep[0] != 1.f || keep[1] != 1.f))
#pragma unroll
            for (int n = 0; n < DIM / 8; n++) {
                o[n][0] *= keep[0], o[n][1] *= keep[0];
                o[n][2] *= keep[1], o[n][3] *= keep[1];
            }
        begin_products();
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++)
            weigh(o, weights[j], operand(values + j * 16 * 8, PANEL * 16));
        end_products();
        wait_for_products();
        if (lane == 0) arrive_at(emptied + stage);
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }

    // The sums of the block: those of the warpgroups that divide the keys, half of them each.
#pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
    }
    float own[OWN_DIMS / 8][4];
#if KEY_GROUPS == 1
#pragma unroll
    for (int n = 0; n < DIM / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) own[n][e] = o[n][e];
#else
    meet();  // the last tile has been read
    if (in_use)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int l = line + 8 * h;
            float2* there = (float2*)(given + (key_group * ROWS + l) * GIVEN_STRIDE + 2 * t);
#pragma unroll
            for (int n = 0; n < OWN_DIMS / 8; n++) {
                const int other = n + OWN_DIMS / 8;
                there[n * 4] = key_group ? make_float2(o[n][2 * h], o[n][2 * h + 1])
                                         : make_float2(o[other][2 * h], o[other][2 * h + 1]);
            }
            if (t == 0) peaks[key_group * ROWS + l] = make_float2(m[h], total[h]);
        }
    meet();
    if (in_use)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int l = line + 8 * h;
            const float2 peak = peaks[(1 - key_group) * ROWS + l];
            const float top = fmaxf(m[h], peak.x);
            const float mine = m[h] == NEVER ? 0.f : power_of_2(m[h] - top);
            const float theirs = peak.x == NEVER ? 0.f : power_of_2(peak.x - top);
            const float2* there =
                (float2*)(given + ((1 - key_group) * ROWS + l) * GIVEN_STRIDE + 2 * t);
#pragma unroll
            for (int n = 0; n < OWN_DIMS / 8; n++) {
                const int upper = n + OWN_DIMS / 8;
                const float2 v = there[n * 4];
                own[n][2 * h] = (key_group ? o[upper][2 * h] : o[n][2 * h]) * mine + v.x * theirs;
                own[n][2 * h + 1] =
                    (key_group ? o[upper][2 * h + 1] : o[n][2 * h + 1]) * mine + v.y * theirs;
            }
            m[h] = top, total[h] = total[h] * mine + peak.y * theirs;
        }
#endif

    // Scaled, and to the block that adds up those of a row.
    if (in_use)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float largest = 0.f;
#pragma unroll
            for (int n = 0; n < OWN_DIMS / 8; n++)
                largest = fmaxf(largest, fmaxf(fabsf(own[n][2 * h]), fabsf(own[n][2 * h + 1])));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const u32 exponent = max(1u, min(253u, __float_as_uint(largest) >> 23));
            const float down = __uint_as_float((254u - exponent) << 23);
            u32* there = sums + (line + 8 * h) * SUM_WORDS;
#pragma unroll
            for (int n = 0; n < OWN_DIMS / 8; n++)
                there[4 + key_group * (OWN_DIMS / 2) + n * 4 + t] =
                    to_halves(own[n][2 * h] * down, own[n][2 * h + 1] * down);
            if (t == 0) there[2 + key_group] = exponent << 23;
            if (t == 0 && key_group == 0)
                there[0] = __float_as_uint(m[h]), there[1] = __float_as_uint(total[h]);
        }
    let_products_read();
    wait_for_all();
    meet();
#pragma unroll 1
    for (int b = warp; b < CLUSTER; b += WARPS)
        if (lane == 0 && b != rank)
            send(of_block(address(inbox + rank * SHARE * SUM_WORDS), b),
                 sums + b * SHARE * SUM_WORDS, MESSAGE, of_block(address(received), b));
    wait_for_landing(received, 0);
    arrive();  // no block leaves while what it sent is on its way

    // Four dimensions a thread.
#pragma unroll 1
    for (int e = threadIdx.x; e < SHARE * (DIM / 4); e += THREADS) {
        const int l = rank * SHARE + e / (DIM / 4), d = e % (DIM / 4) * 4;
        if (l >= ROWS || l / GROUP >= count) continue;
        auto row_from = [&](int b) {
            return (b == rank ? sums : inbox) + (b * SHARE + e / (DIM / 4)) * SUM_WORDS;
        };
        float top = NEVER, weights = 0.f;
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) top = fmaxf(top, __uint_as_float(*row_from(b)));
        float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            const uint4 about = *(uint4*)row_from(b);
            const uint2 pairs = *(uint2*)(row_from(b) + 4 + d / 2);
            const float peak = __uint_as_float(about.x);
            const float w = peak == NEVER ? 0.f : power_of_2(peak - top);
            const float up = w * __uint_as_float(d < OWN_DIMS ? about.z : about.w);
            const float2 v0 = of_halves(pairs.x), v1 = of_halves(pairs.y);
            weights += w * __uint_as_float(about.y);
            acc.x += up * v0.x, acc.y += up * v0.y, acc.z += up * v1.x, acc.w += up * v1.y;
        }
        const float whole = 1.f / weights;
        const long at = ((long)(begin + l / GROUP) * HEADS + kv_head * GROUP + l % GROUP) * DIM + d;
        *(uint2*)(out + at) = make_uint2(pack(acc.x * whole, acc.y * whole),
                                         pack(acc.z * whole, acc.w * whole));
    }
    wait_for_all();
}
