// Attention of a few rows per sequence over its paged cache, from the projection to what the output
// projection takes: QK-norm, rotary embedding, the new keys and values into their slots, attention.
//
// A cluster of CLUSTER blocks serves one KV head of one run. Tiles of keys are dealt out to its
// blocks in turn, by their position alone; each block keeps an online softmax of its own, and at the
// end sends the sums of a row to the block of the cluster that adds them up, in a fixed order. What a
// row does not see adds exactly nothing: its result depends on its own limit and on nothing else.
//
// Keys that other steps have written are asked for before the kernel waits for the projection; those
// of this step are computed from it, by every block that needs them, and written by their own run's.
//
// The dimensions of a key may go to the instruction in any order as long as the query's do alike, so
// both are read 16 contiguous bytes at a time.
//
// Compiled for: HEADS, KV_HEADS, DIM (64 or 128), PAGE (tokens of a block of the cache), ROWS (of a
// run times heads of a group, a multiple of 16 up to 128), KEY_GROUPS (warps that divide the keys of
// a tile, and then the dimensions of its values), STAGES (tiles in flight), CLUSTER, TABLE and SCRATCH
// (widths), TREE, NORM.
//
// It is so short that fetching its instructions counts: loops are unrolled only where registers are
// at stake.

#define GROUP (HEADS / KV_HEADS)
#define TILE 64
#define ROW_GROUPS (ROWS / 16)
#define WARPS (ROW_GROUPS * KEY_GROUPS)
#define THREADS (WARPS * 32)
#define WARP_KEYS (TILE / KEY_GROUPS)
#define Q_STRIDE (DIM / 8 + 4)  // in 16 bytes
#define K_STRIDE (DIM / 8 + 4)
#define V_STRIDE (DIM / 8 + 1)
#define W_STRIDE (TILE / 8 + 1)
#define WARP_DIMS (DIM / KEY_GROUPS)
#define STAGE (TILE * (K_STRIDE + V_STRIDE))
#define PAGES (TILE / PAGE)  // of a tile
#define OWN_PAGES (((TABLE + PAGES - 1) / PAGES + CLUSTER - 1) / CLUSTER * PAGES)  // of a block
#define LANES (DIM / 4)  // that share a vector
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

__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;"); }

// Until no more than so many groups of copies are on their way.
template <int LEFT> __device__ __forceinline__ void wait_for_groups() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ void transposed(u32 (&r)[4], u32 where) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(where));
}

__device__ __forceinline__ void straight(u32 (&r)[4], u32 where) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(where));
}

__device__ __forceinline__ u32 of_block(u32 where, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(where), "r"(block));
    return there;
}

__device__ __forceinline__ void send(u32 where, float2 v) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(where), "f"(v.x), "f"(v.y)
                 : "memory");
}

__device__ __forceinline__ void arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait_for_all() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// A lane's four elements of a vector: two of its first half, the two opposite of its second.
struct Turned {
    u32 first, second;
};

__device__ __forceinline__ Turned turn(u32 first, u32 second, const u32* norm, const u32* cosine,
                                       const u32* sine, float eps, int lane) {
    float a0 = low(first), a1 = high(first), b0 = low(second), b1 = high(second);
#if NORM
    float squares = a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1;
#pragma unroll
    for (int d = LANES / 2; d > 0; d /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, d);
    const float scale = rsqrtf(squares * (1.f / DIM) + eps);
    const u32 n0 = __ldg(norm + lane), n1 = __ldg(norm + LANES + lane);
    a0 *= scale * low(n0), a1 *= scale * high(n0), b0 *= scale * low(n1), b1 *= scale * high(n1);
#endif
    const u32 c0 = __ldg(cosine + lane), c1 = __ldg(cosine + LANES + lane);
    const u32 s0 = __ldg(sine + lane), s1 = __ldg(sine + LANES + lane);
    return {pack(a0 * low(c0) + b0 * low(s0), a1 * high(c0) + b1 * high(s0)),
            pack(b0 * low(c1) + a0 * low(s1), b1 * high(c1) + a1 * high(s1))};
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
                   float eps) {
    extern __shared__ uint4 shared[];
    float* inbox = (float*)shared;                           // [CLUSTER][SHARE][DIM]
    float2* inbox_peaks = (float2*)(inbox + CLUSTER * SHARE * DIM);  // [CLUSTER][SHARE]
    uint4* queries = (uint4*)(inbox_peaks + CLUSTER * SHARE);        // [ROWS][Q_STRIDE]
    uint4* weights = queries + ROWS * Q_STRIDE;              // [ROWS][W_STRIDE]
    float* peaks = (float*)(weights + ROWS * W_STRIDE);      // [KEY_GROUPS][ROWS]
    int* pages = (int*)(peaks + KEY_GROUPS * ROWS);          // [OWN_PAGES]
    int* tail_slots = pages + (OWN_PAGES + 3) / 4 * 4;       // [SCRATCH]
    uint4* stages = (uint4*)(tail_slots + (SCRATCH + 3) / 4 * 4);
    const int rank = blockIdx.x % CLUSTER, kv_head = blockIdx.x / CLUSTER, run = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int row_group = warp % ROW_GROUPS, key_group = warp / ROW_GROUPS;
    const int line = row_group * 16 + g;  // and the one 8 below it
    let_next_begin();

    // What is read before the wait was written before the first kernel of this step.
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
    arrive();  // nothing is sent to a block before it is there
#pragma unroll 1
    for (int i = threadIdx.x; i < OWN_PAGES; i += THREADS) {
        const int page = (i / PAGES * CLUSTER + rank) * PAGES + i % PAGES;
        if (page * PAGE < end) pages[i] = tables[(long)run * TABLE + page];
    }
#if TREE
#pragma unroll 1
    for (int i = threadIdx.x; i < tail; i += THREADS)
        tail_slots[i] = scratch[(long)run * SCRATCH + i];
#endif
    int limit[2], branch[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = begin + min((line + 8 * h) / GROUP, count - 1);
        limit[h] = min(limits[row], end - 1);
        branch[h] = TREE ? branches[row] : -1;
    }
    const int lowest = __reduce_min_sync(0xffffffffu, min(limit[0], limit[1]));
    __syncthreads();

    // What earlier steps have written. What lies beyond the end is zero.
    auto ask = [&](int tile, int stage) {
        uint4* keys = stages + stage * STAGE;
        uint4* values = keys + TILE * K_STRIDE;
        if (tile < tiles)
#pragma unroll 1
            for (int p = threadIdx.x; p < TILE * (DIM / 8); p += THREADS) {
                const int k = p / (DIM / 8), part = p % (DIM / 8);
                long slot = 0;
                bool inside, mine;
                if (tile < shared_tiles) {
                    const int position = tile * TILE + k;
                    inside = position < end, mine = position >= fresh;
                    if (inside)
                        slot = (long)pages[tile / CLUSTER * PAGES + k / PAGE] * PAGE + k % PAGE;
                } else {
                    const int index = (tile - shared_tiles) * TILE + k;
                    inside = index < tail, mine = index >= fresh_tail;
                    if (inside) slot = tail_slots[index];
                }
                if (inside && mine) continue;
                const long at = (slot * KV_HEADS + kv_head) * (DIM / 8) + part;
                copy_piece(keys + k * K_STRIDE + part, key + at, inside);
                copy_piece(values + k * V_STRIDE + part, value + at, inside);
            }
        end_group();
    };

    // What this step adds: from its projection, by one warp for each 32 / LANES keys.
    auto compute = [&](int tile, int stage) {
        if (tile >= tiles) return;
        const bool in_tail = tile >= shared_tiles;
        const int first = (in_tail ? tile - shared_tiles : tile) * TILE;
        const int from = max(first, in_tail ? fresh_tail : fresh);
        const int to = min(first + TILE, in_tail ? tail : end);
        u32* keys = (u32*)(stages + stage * STAGE);
        u32* values = keys + TILE * K_STRIDE * 4;
        const int part = lane % LANES;
#pragma unroll 1
        for (int at = from + warp * (32 / LANES); at < to; at += WARPS * (32 / LANES)) {
            const int mine = min(at + lane / LANES, to - 1), k = mine - first;
            const int row = in_tail ? begin + mine - fresh_tail : source + mine - fresh;
            const u32* here =
                projected + ((long)row * (HEADS + 2 * KV_HEADS) + HEADS + kv_head) * (DIM / 2);
            const u32* there = here + KV_HEADS * (DIM / 2);
            const u32 v0 = __ldcg(there + part), v1 = __ldcg(there + LANES + part);
            const long angle = (long)positions[row] * (DIM / 2);
            const Turned turned =
                turn(__ldcg(here + part), __ldcg(here + LANES + part),
                     norm + (HEADS + kv_head) * (DIM / 2), cosine + angle, sine + angle, eps, part);
            keys[k * K_STRIDE * 4 + part] = turned.first;
            keys[k * K_STRIDE * 4 + LANES + part] = turned.second;
            values[k * V_STRIDE * 4 + part] = v0;
            values[k * V_STRIDE * 4 + LANES + part] = v1;
            if (in_tail || source == begin) {
                const long to_slot = ((long)slots[row] * KV_HEADS + kv_head) * (DIM / 2);
                ((u32*)key)[to_slot + part] = turned.first;
                ((u32*)key)[to_slot + LANES + part] = turned.second;
                ((u32*)value)[to_slot + part] = v0;
                ((u32*)value)[to_slot + LANES + part] = v1;
            }
        }
    };

#pragma unroll 1
    for (int s = 0; s < STAGES; s++) ask(rank + s * CLUSTER, s);
    wait_for_previous();

    // The query, as the first operand: for each 32 dimensions, those 8t to 8t + 7 of two rows.
#pragma unroll 2
    for (int i = 0; i < (ROWS * LANES + THREADS - 1) / THREADS; i++) {
        const int l = (i * THREADS + (int)threadIdx.x) / LANES, part = lane % LANES;
        const int row = begin + min(l / GROUP, count - 1), head = kv_head * GROUP + l % GROUP;
        const u32* here = projected + ((long)row * (HEADS + 2 * KV_HEADS) + head) * (DIM / 2);
        const long angle = (long)positions[row] * (DIM / 2);
        const Turned turned = turn(__ldcg(here + part), __ldcg(here + LANES + part),
                                   norm + head * (DIM / 2), cosine + angle, sine + angle, eps, part);
        if (l < ROWS) {
            ((u32*)queries)[l * Q_STRIDE * 4 + part] = turned.first;
            ((u32*)queries)[l * Q_STRIDE * 4 + LANES + part] = turned.second;
        }
    }
#pragma unroll 1
    for (int s = 0; s < STAGES; s++) compute(rank + s * CLUSTER, s);
    __syncthreads();
    float m[2] = {NEVER, NEVER}, total[2] = {0.f, 0.f};
    float o[WARP_DIMS / 8][4] = {};
    int stage = 0;
#pragma unroll 1
    for (int tile = rank; tile < tiles; tile += CLUSTER) {
        wait_for_groups<STAGES - 1>();
        __syncthreads();
        const uint4* keys = stages + stage * STAGE;
        const uint4* values = keys + TILE * K_STRIDE;

        float s[WARP_KEYS / 8][4] = {};
#pragma unroll
        for (int c = 0; c < DIM / 32; c++) {
            const uint4 q0 = queries[line * Q_STRIDE + c * 4 + t];
            const uint4 q1 = queries[(line + 8) * Q_STRIDE + c * 4 + t];
#pragma unroll
            for (int j = 0; j < WARP_KEYS / 8; j++) {
                const uint4 b = keys[(key_group * WARP_KEYS + j * 8 + g) * K_STRIDE + c * 4 + t];
                multiply(s[j], q0.x, q1.x, q0.y, q1.y, b.x, b.y);
                multiply(s[j], q0.z, q1.z, q0.w, q1.w, b.z, b.w);
            }
        }

        // What a row sees: up to its bound, and in the tail only its own branch.
        const bool in_tail = TREE && tile >= shared_tiles;
        const int first = (in_tail ? tile - shared_tiles : tile) * TILE;
        if (in_tail || first + TILE - 1 > lowest) {
            const int bound[2] = {in_tail ? tail - 1 : limit[0], in_tail ? tail - 1 : limit[1]};
#pragma unroll
            for (int j = 0; j < WARP_KEYS / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int at = first + key_group * WARP_KEYS + j * 8 + 2 * t + e;
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
        float highest[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            highest[h] = s[0][2 * h];
#pragma unroll
            for (int j = 0; j < WARP_KEYS / 8; j++)
                highest[h] = fmaxf(highest[h], fmaxf(s[j][2 * h], s[j][2 * h + 1]));
            highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffffu, highest[h], 1));
            highest[h] = fmaxf(highest[h], __shfl_xor_sync(0xffffffffu, highest[h], 2));
            if (KEY_GROUPS > 1 && t == 0) peaks[key_group * ROWS + line + 8 * h] = highest[h];
        }
        if (KEY_GROUPS > 1) __syncthreads();
        // A row that has seen nothing yet keeps its weights at 0.
        float keep[2], base[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
#pragma unroll
            for (int k = 0; k < KEY_GROUPS && KEY_GROUPS > 1; k++)
                highest[h] = fmaxf(highest[h], peaks[k * ROWS + line + 8 * h]);
            highest[h] = fmaxf(m[h], highest[h] == NEVER ? NEVER : highest[h] * scale);
            base[h] = highest[h] == NEVER ? 0.f : highest[h];
            keep[h] = power_of_2(m[h] - base[h]);
            m[h] = highest[h];
            total[h] *= keep[h];
        }
#pragma unroll
        for (int j = 0; j < WARP_KEYS / 8; j++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const float w0 = power_of_2(fmaf(s[j][2 * h], scale, -base[h]));
                const float w1 = power_of_2(fmaf(s[j][2 * h + 1], scale, -base[h]));
                total[h] += w0 + w1;
                ((u32*)(weights + (line + 8 * h) * W_STRIDE))[(key_group * WARP_KEYS + j * 8) / 2 + t] =
                    pack(w0, w1);
            }
#pragma unroll
        for (int n = 0; n < WARP_DIMS / 8; n++) {
            o[n][0] *= keep[0], o[n][1] *= keep[0];
            o[n][2] *= keep[1], o[n][3] *= keep[1];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < TILE / 16; j++) {
            u32 a[4];
            straight(a, address(weights + (row_group * 16 + lane % 16) * W_STRIDE + 2 * j + lane / 16));
            // Of the four 8 x 8 matrices: keys 0-7 and 8-15, of dimensions n and n + 8.
#pragma unroll
            for (int n = 0; n < WARP_DIMS / 16; n++) {
                u32 v[4];
                transposed(v, address(values + (j * 16 + lane % 16) * V_STRIDE +
                                      key_group * (WARP_DIMS / 8) + 2 * n + lane / 16));
                multiply(o[2 * n], a[0], a[1], a[2], a[3], v[0], v[1]);
                multiply(o[2 * n + 1], a[0], a[1], a[2], a[3], v[2], v[3]);
            }
        }
        if (tile + CLUSTER >= tiles) break;
        __syncthreads();
        ask(tile + STAGES * CLUSTER, stage);
        compute(tile + STAGES * CLUSTER, stage);
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // The sums of the block, to where those of the cluster are added up.
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 1);
        total[h] += __shfl_xor_sync(0xffffffffu, total[h], 2);
        if (t == 0) peaks[key_group * ROWS + line + 8 * h] = total[h];
    }
    __syncthreads();
    wait_for_all();
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int l = line + 8 * h, place = rank * SHARE + l % SHARE;
        const u32 there = of_block(address(inbox + place * DIM + key_group * WARP_DIMS + 2 * t),
                                   l / SHARE);
#pragma unroll
        for (int n = 0; n < WARP_DIMS / 8; n++)
            send(there + n * 32, make_float2(o[n][2 * h], o[n][2 * h + 1]));
        if (key_group == 0 && t == 0) {
            float sum = 0.f;
#pragma unroll
            for (int k = 0; k < KEY_GROUPS; k++) sum += peaks[k * ROWS + l];
            send(of_block(address(inbox_peaks + place), l / SHARE), make_float2(m[h], sum));
        }
    }
    arrive();
    wait_for_all();

    // Four dimensions a thread of the rows that are this block's to finish.
#pragma unroll 1
    for (int e = threadIdx.x; e < SHARE * (DIM / 4); e += THREADS) {
        const int l = rank * SHARE + e / (DIM / 4), d = e % (DIM / 4) * 4;
        if (l >= ROWS || l / GROUP >= count) continue;
        float top = NEVER, weights = 0.f;
#pragma unroll
        for (int b = 0; b < CLUSTER; b++)
            top = fmaxf(top, inbox_peaks[b * SHARE + e / (DIM / 4)].x);
        float4 acc = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int b = 0; b < CLUSTER; b++) {
            const float2 peak = inbox_peaks[b * SHARE + e / (DIM / 4)];
            const float4 v = *(float4*)(inbox + (b * SHARE + e / (DIM / 4)) * DIM + d);
            const float w = peak.x == NEVER ? 0.f : power_of_2(peak.x - top);
            weights += w * peak.y;
            acc.x += w * v.x, acc.y += w * v.y, acc.z += w * v.z, acc.w += w * v.w;
        }
        const float whole = 1.f / weights;
        const long at = ((long)(begin + l / GROUP) * HEADS + kv_head * GROUP + l % GROUP) * DIM + d;
        *(uint2*)(out + at) = make_uint2(pack(acc.x * whole, acc.y * whole),
                                         pack(acc.z * whole, acc.w * whole));
    }
}
