// Attention of a few rows per sequence over its paged cache, from the projection to what the output
// projection takes: QK-norm, rotary embedding, the new keys and values into their slots, attention.
//
// A cluster of CLUSTER blocks serves one KV head of one run. Tiles of keys are dealt out to its
// blocks in turn, by their position alone. Warpgroups divide the rows of a block, 64 each, and the
// keys of every tile; each keeps an online softmax of its own. At the end the sums of a row go to the
// block of the cluster that adds them up, in a fixed order. What a row does not see adds exactly
// nothing: its result depends on its own limit and on nothing else.
//
// Keys that other steps have written are asked for before the kernel waits for the projection, page
// by page, from the copy engine; those of this step are computed from it, by every block that needs
// them, and written by their own run's. What the cache holds beyond a sequence's end is finite, and
// gets no weight.
//
// Queries, keys and values lie in panels of 64 dimensions, whose rows of 128 bytes are swizzled as
// wgmma takes them: the second operand of both products straight from there, the weights of the
// values from the registers in which they were computed.
//
// Compiled for: HEADS, KV_HEADS, DIM (64 or 128), PAGE (tokens of a block of the cache), ROWS (of a
// run times heads of a group, a multiple of 16 up to 128), KEY_GROUPS (warpgroups that divide the
// keys of a tile: 1 or 2), STAGES (tiles in shared memory), CLUSTER, TABLE and SCRATCH (widths), TREE,
// NORM.
//
// It is so short that fetching its instructions counts: loops are unrolled only where registers are
// at stake.

#define GROUP (HEADS / KV_HEADS)
#define TILE 64
#define ROW_GROUPS ((ROWS + 63) / 64)
#define WARPS (ROW_GROUPS * KEY_GROUPS * 4)
#define THREADS (WARPS * 32)
#define KEYS (TILE / KEY_GROUPS)  // of a tile, of a warpgroup
#define PANELS (DIM / 64)
#define PANEL (TILE * 8)                    // of keys or values, in 16 bytes
#define QUERY_PANEL (ROW_GROUPS * 64 * 8)  // likewise
#define STAGE (2 * PANELS * PANEL)
#define OWN_DIMS (DIM / KEY_GROUPS)  // that a warpgroup adds up for its rows
#define GIVEN_STRIDE (DIM / 2 + 8)
#define SUM_STRIDE (DIM + 8)
#define PAGES (TILE / PAGE)  // of a tile
#define COPIES (2 * PANELS * PAGES)  // that bring a tile
#define OUTSIDE (1 << 30)  // a slot that no cache has: what is copied from there is zero
#define LANES (DIM / 4)  // that share a vector
#define VECTORS ((ROWS * LANES + THREADS - 1) / THREADS)  // of the query, that a thread helps with
#define SHARE ((ROWS + CLUSTER - 1) / CLUSTER)  // rows that a block adds up
#define NEVER (-1e30f)

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void copy_piece(uint4* to, const uint4* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(to)), "l"(from),
                 "r"(inside ? 16 : 0));
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ u32 of_block(u32 where, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(where), "r"(block));
    return there;
}

__device__ __forceinline__ float4 fetch_four(u32 where) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(where) : "memory");
    return v;
}

__device__ __forceinline__ float2 fetch_two(u32 where) {
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(where)
                 : "memory");
    return v;
}

__device__ __forceinline__ void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_all() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Matrix instructions of a warpgroup: 64 rows. They run on beside what follows until waited for.

// 64 bits that say where an operand lies: panels, or groups of eight rows of one, are so far apart.
__device__ __forceinline__ u64 operand(const void* panel, int panels_apart) {
    return (u64)(address(panel) >> 4 & 0x3fffu) | (u64)(panels_apart >> 4) << 16 |
           (u64)(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void begin_products() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// What this thread wrote to shared memory can be read by matrix instructions after a barrier.
__device__ __forceinline__ void let_products_read() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define FOUR(c, i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, i + 1), FOUR(c, i + 2), FOUR(c, i + 3)
#define IN_16 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define IN_32 \
    IN_16 ", " "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define IN_64 \
    IN_32 ", " "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, " \
    "%49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// s (+)= queries * keys, 16 dimensions of both.
__device__ __forceinline__ void score(float (&s)[KEYS / 8][4], u64 queries, u64 keys, int add) {
#if KEYS == 32
    asm volatile("{.reg .pred p; setp.ne.b32 p, %18, 0; wgmma.mma_async.sync.aligned.m64n32k16"
                 ".f32.bf16.bf16 {" IN_16 "}, %16, %17, p, 1, 1, 0, 0;}"
                 : SIXTEEN(s, 0) : "l"(queries), "l"(keys), "r"(add));
#else
    asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0; wgmma.mma_async.sync.aligned.m64n64k16"
                 ".f32.bf16.bf16 {" IN_32 "}, %32, %33, p, 1, 1, 0, 0;}"
                 : SIXTEEN(s, 0), SIXTEEN(s, 4) : "l"(queries), "l"(keys), "r"(add));
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

// Where pair d of a row lies in panels of that size, in 4 bytes.
__device__ __forceinline__ int placed_pair(int panel, int row, int d) {
    return (d / 32 * panel + placed(row, d % 32 / 4)) * 4 + d % 4;
}

// The copy engine. It finds a cache by its map, and tells a barrier what has landed.

struct alignas(64) Map {
    u64 words[16];
};

__device__ __forceinline__ void make_landing(u64* landed) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(landed)) : "memory");
}

__device__ __forceinline__ void show_landings() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void expect(u64* landed, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(landed)),
                 "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for_landing(u64* landed, int phase) {
    asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; "
                 "@!p bra again;}" ::"r"(address(landed)), "r"(phase) : "memory");
}

// 64 dimensions of one head, of a page's tokens.
__device__ __forceinline__ void copy_page(uint4* to, const Map* cache, int dim, int head, int slot,
                                          u64* landed) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(address(to)), "l"(cache), "r"(dim),
                 "r"(head), "r"(slot), "r"(address(landed)) : "memory");
}

// A lane's four elements of a vector: two of its first half, the two opposite of its second.
struct Turned {
    u32 first, second;
};

// Of one position and one lane; the two halves of a vector turn by the same angles.
struct Angle {
    u32 cosine, sine;
};

__device__ __forceinline__ Angle angle_at(const u32* cosine, const u32* sine, int position,
                                          int lane) {
    const long at = (long)position * (DIM / 2) + LANES + lane;
    return {__ldg(cosine + at), __ldg(sine + at)};
}

__device__ __forceinline__ Turned turn(u32 first, u32 second, const u32* norm, Angle angle, float eps,
                                       int lane) {
    float a0 = low(first), a1 = high(first), b0 = low(second), b1 = high(second);
#if NORM
    const u32 n0 = __ldg(norm + lane), n1 = __ldg(norm + LANES + lane);
    float squares = a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1;
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    const float scale = rsqrtf(squares * (1.f / DIM) + eps);
    a0 *= scale * low(n0), a1 *= scale * high(n0), b0 *= scale * low(n1), b1 *= scale * high(n1);
#endif
    const float c0 = low(angle.cosine), c1 = high(angle.cosine);
    const float s0 = low(angle.sine), s1 = high(angle.sine);
    return {pack(a0 * c0 - b0 * s0, a1 * c1 - b1 * s1), pack(b0 * c0 + a0 * s0, b1 * c1 + a1 * s1)};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
few_rows_attention(const u32* projected,               // [rows][HEADS + 2 * KV_HEADS][DIM]
                   const u32* __restrict__ norm,       // [HEADS + KV_HEADS][DIM]
                   const u32* __restrict__ cosine,     // [positions][DIM]
                   const u32* __restrict__ sine,       // likewise; negated in its first half
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
    float* sums = (float*)(stages + STAGES * STAGE);          // [ROWS][SUM_STRIDE]
    float2* sum_peaks = (float2*)(sums + ROWS * SUM_STRIDE);  // [ROWS]
    float2* peaks = sum_peaks + ROWS;                         // [KEY_GROUPS][ROWS]
    u64* landed = (u64*)(peaks + KEY_GROUPS * ROWS);          // [STAGES]
    const int rank = blockIdx.x % CLUSTER, kv_head = blockIdx.x / CLUSTER, run = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_group = warp / 4 % ROW_GROUPS, key_group = warp / 4 / ROW_GROUPS;
    const int line = row_group * 64 + warp % 4 * 16 + g;  // and the one 8 below it
    const bool in_use = line - g < ROWS;                  // of all lines of a warp
    let_next_begin();

    // What is read before the wait was written before the first kernel of this step.
    auto page_of = [&](int tile) {  // for the copy that is this lane's
        const int number = tile * PAGES + lane / (2 * PANELS);
        return warp == 0 && lane < COPIES && number < TABLE ? __ldg(tables + run * TABLE + number)
                                                            : 0;
    };
    int first_pages[STAGES];
#pragma unroll
    for (int s = 0; s < STAGES; s++) first_pages[s] = page_of(rank + s * CLUSTER);
    int next_page = page_of(rank + STAGES * CLUSTER);
    const int end = run_end[run], begin = run_begin[run], count = run_rows[run];
    const int shared_tiles = (end + TILE - 1) / TILE;
    int tail = 0, num_branches = 1;
#if TREE
    num_branches = max(1, run_branches[run]);
    tail = num_branches * run_depths[run];
#endif
    const int tiles = shared_tiles + (tail + TILE - 1) / TILE;
    const int fresh = run_new[run], source = run_source[run];
    const float per_branch = 1.f / num_branches;
    const int fresh_tail = tail - num_branches;  // slots from here on are of this step
    if (!count || !tiles) {
        wait_for_previous();
        return;
    }
    if (threadIdx.x == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) make_landing(landed + s);
        show_landings();
    }
    __syncwarp();

    // What earlier steps have written, and whatever else lies in those pages.
    auto ask = [&](int tile, int stage, int page) {
        if (warp || tile >= shared_tiles) return;
        const int number = tile * PAGES + lane / (2 * PANELS), panel = lane / 2 % PANELS;
        uint4* to = stages + stage * STAGE + (lane % 2 * PANELS + panel) * PANEL;
        if (lane == 0) expect(landed + stage, STAGE * 16);
        if (lane < COPIES)
            copy_page(to + lane / (2 * PANELS) * PAGE * 8, lane % 2 ? &value_map : &key_map,
                      panel * 64, kv_head, number * PAGE < end ? page * PAGE : OUTSIDE,
                      landed + stage);
    };

    // The same of a tail, whose slots lie anywhere. What lies beyond it is zero.
    auto ask_tail = [&](int tile, int stage) {
        const int part = threadIdx.x % (DIM / 8);
        uint4* keys = stages + stage * STAGE + part / 8 * PANEL;
        uint4* values = keys + PANELS * PANEL;
        if (TREE && tile >= shared_tiles && tile < tiles)
#pragma unroll 2
            for (int i = 0; i < TILE * (DIM / 8) / THREADS; i++) {
                const int k = (i * THREADS + (int)threadIdx.x) / (DIM / 8);
                const int index = (tile - shared_tiles) * TILE + k;
                const bool inside = index < tail;
                if (inside && index >= fresh_tail) continue;
                const long slot = inside ? __ldg(scratch + run * SCRATCH + index) : 0;
                const long at = (slot * KV_HEADS + kv_head) * (DIM / 8) + part;
                copy_piece(keys + placed(k, part % 8), key + at, inside);
                copy_piece(values + placed(k, part % 8), value + at, inside);
            }
    };

#pragma unroll
    for (int s = 0; s < STAGES; s++) ask(rank + s * CLUSTER, s, first_pages[s]);
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) ask_tail(rank + s * CLUSTER, s);
    int limit[2], branch[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = begin + min((line + 8 * h) / GROUP, count - 1);
        limit[h] = min(limits[row], end - 1);
        branch[h] = TREE ? branches[row] : -1;
    }
    const int part = lane % LANES;
    auto vector_line = [&](int i) { return (i * THREADS + (int)threadIdx.x) / LANES; };
    Angle angles[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++)
        angles[i] = angle_at(cosine, sine,
                             positions[begin + min(vector_line(i) / GROUP, count - 1)], part);
    const int lowest = __reduce_min_sync(0xffffffffu, min(limit[0], limit[1]));

    // What this step adds: from its projection, by one warp for each 32 / LANES keys.
    auto compute = [&](int tile, int stage) {
        const bool in_tail = tile >= shared_tiles;
        const int first = (in_tail ? tile - shared_tiles : tile) * TILE;
        const int from = max(first, in_tail ? fresh_tail : fresh);
        const int to = min(first + TILE, in_tail ? tail : end);
        u32* keys = (u32*)(stages + stage * STAGE);
        u32* values = keys + PANELS * PANEL * 4;
#pragma unroll 1
        for (int at = from + warp * (32 / LANES); at < to; at += WARPS * (32 / LANES)) {
            const int mine = min(at + lane / LANES, to - 1), k = mine - first;
            const int row = in_tail ? begin + mine - fresh_tail : source + mine - fresh;
            const u32* here =
                projected + ((long)row * (HEADS + 2 * KV_HEADS) + HEADS + kv_head) * (DIM / 2);
            const u32* there = here + KV_HEADS * (DIM / 2);
            const u32 v0 = __ldcg(there + part), v1 = __ldcg(there + LANES + part);
            const Turned turned = turn(__ldcg(here + part), __ldcg(here + LANES + part),
                                       norm + (HEADS + kv_head) * (DIM / 2),
                                       angle_at(cosine, sine, positions[row], part), eps, part);
            const int first_pair = placed_pair(PANEL, k, part);
            const int second_pair = placed_pair(PANEL, k, LANES + part);
            keys[first_pair] = turned.first, keys[second_pair] = turned.second;
            values[first_pair] = v0, values[second_pair] = v1;
            if (in_tail || source == begin) {
                const long to_slot = ((long)slots[row] * KV_HEADS + kv_head) * (DIM / 2);
                ((u32*)key)[to_slot + part] = turned.first;
                ((u32*)key)[to_slot + LANES + part] = turned.second;
                ((u32*)value)[to_slot + part] = v0;
                ((u32*)value)[to_slot + LANES + part] = v1;
            }
        }
    };

    wait_for_previous();
    u32 halves[VECTORS][2];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int l = vector_line(i), head = kv_head * GROUP + l % GROUP;
        const int row = begin + min(l / GROUP, count - 1);
        const u32* here = projected + ((long)row * (HEADS + 2 * KV_HEADS) + head) * (DIM / 2);
        halves[i][0] = __ldcg(here + part), halves[i][1] = __ldcg(here + LANES + part);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        const int l = vector_line(i), head = kv_head * GROUP + l % GROUP;
        const Turned turned = turn(halves[i][0], halves[i][1], norm + min(head, HEADS - 1) * (DIM / 2),
                                   angles[i], eps, part);
        if (l < ROWS) {
            ((u32*)queries)[placed_pair(QUERY_PANEL, l, part)] = turned.first;
            ((u32*)queries)[placed_pair(QUERY_PANEL, l, LANES + part)] = turned.second;
        }
    }
    let_products_read();
    __syncthreads();

    float m[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f};
    float o[DIM / 8][4] = {};
    int stage = 0, phase = 0;
#pragma unroll 1
    for (int tile = rank; tile < tiles; tile += CLUSTER) {
        const bool in_tail = TREE && tile >= shared_tiles;
        const int first = (in_tail ? tile - shared_tiles : tile) * TILE;
        if (in_tail)
            wait_for_copies();
        else
            wait_for_landing(landed + stage, phase);
        if (in_tail || first + TILE > fresh) {
            compute(tile, stage);
            let_products_read();
        }
        __syncthreads();
        const uint4* keys = stages + stage * STAGE + key_group * KEYS * 8;
        const uint4* values = keys + PANELS * PANEL;

        float s[KEYS / 8][4];
        begin_products();
#pragma unroll
        for (int c = 0; c < DIM / 16; c++)
            score(s, operand(queries + c / 4 * QUERY_PANEL + row_group * 512 + c % 4 * 2, 0),
                  operand(keys + c / 4 * PANEL + c % 4 * 2, 0), c > 0);
        end_products();
        if (tile != rank) {  // into the place of the tile before this one
            const int free_stage = stage ? stage - 1 : STAGES - 1;
            ask(tile + (STAGES - 1) * CLUSTER, free_stage, next_page);
            ask_tail(tile + (STAGES - 1) * CLUSTER, free_stage);
            next_page = page_of(tile + STAGES * CLUSTER);
        }
        wait_for_products();

        // What a row sees: up to its bound, and in the tail only its own branch.
        if (in_tail || first + TILE - 1 > lowest) {
            const int bound[2] = {in_tail ? tail - 1 : limit[0], in_tail ? tail - 1 : limit[1]};
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
                        bool sees = at <= bound[h];
#if TREE
                        sees = sees && (!in_tail || whose == branch[h]);
#endif
                        if (!sees) s[j][2 * h + e] = NEVER;
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
    __syncthreads();  // the last tile has been read
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
    __syncthreads();
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

    // To where the block of the cluster that adds a row up finds them.
    if (in_use)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int l = line + 8 * h;
            float2* there = (float2*)(sums + l * SUM_STRIDE + key_group * OWN_DIMS + 2 * t);
#pragma unroll
            for (int n = 0; n < OWN_DIMS / 8; n++)
                there[n * 4] = make_float2(own[n][2 * h], own[n][2 * h + 1]);
            if (key_group == 0 && t == 0) sum_peaks[l] = make_float2(m[h], total[h]);
        }
    arrive();
    wait_for_all();

    // Four dimensions a thread.
#pragma unroll 1
    for (int e = threadIdx.x; e < SHARE * (DIM / 4); e += THREADS) {
        const int l = rank * SHARE + e / (DIM / 4), d = e % (DIM / 4) * 4;
        if (l >= ROWS || l / GROUP >= count) continue;
        const u32 peak_there = address(sum_peaks + l), sum_there = address(sums + l * SUM_STRIDE + d);
        float2 peak[CLUSTER];
        float4 v[CLUSTER];
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            peak[b] = fetch_two(of_block(peak_there, b));
            v[b] = fetch_four(of_block(sum_there, b));
        }
        float top = NEVER, weights = 0.f;
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) top = fmaxf(top, peak[b].x);
        float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            const float w = peak[b].x == NEVER ? 0.f : power_of_2(peak[b].x - top);
            weights += w * peak[b].y;
            acc.x += w * v[b].x, acc.y += w * v[b].y, acc.z += w * v[b].z, acc.w += w * v[b].w;
        }
        const float whole = 1.f / weights;
        const long at = ((long)(begin + l / GROUP) * HEADS + kv_head * GROUP + l % GROUP) * DIM + d;
        *(uint2*)(out + at) = make_uint2(pack(acc.x * whole, acc.y * whole),
                                         pack(acc.z * whole, acc.w * whole));
    }
    arrive();  // no block leaves while another one reads its sums
    wait_for_all();
}
