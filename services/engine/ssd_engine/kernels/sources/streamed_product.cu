// Rows times a weight that streams by, for up to 256 rows. What a row gives depends on that row and
// on the weight, bit for bit, not on how many rows there are.
//
// A tile is 128 rows of the weight. They are the first operand of the matrix instructions, the rows
// of x are the second, so that 8 of them cost no more than they must. Along k every tile is added up
// in slices: one, or as many as its wave says (SPLITS), each from its first k to its last, and the
// sums of slices by twos, and twos of these. Slices follow from the weight's shape and from the
// device, and nothing else about a launch changes the order of additions.
//
// A warp asks the copy engine for pieces of the weight and of x, STAGES ahead. Two groups of four
// warps multiply, each with half of the tile. Of a tile that several blocks have slices of, the last
// one adds up what the others leave in memory; it has more of k than the others, and finds their
// sums when it is done. Where rows are many (APART), another kernel adds; or these blocks are a
// cluster (TOGETHER): each gets from the others what they have of its share of the rows, and adds.
//
// NORM: x is to be normalised. It comes as the hidden states times the norm's weight; their squares,
// added up by 64, give the scale of each row, which the sums are multiplied with.
// GATED: silu(first half of the outputs) * second half. The halves' rows lie in eights beside each
// other, so that a thread has both.
// RESIDUAL: onto the hidden states. Then these times the next norm's weight, and their squares, are
// written, too.
//
// Compiled for: N, K, ROWS (8 to 256, a multiple of 8), STAGES, PANELS (of 64 k, of a stage), WAVES,
// SPLITS, FIRSTS (the first tile of each wave, and the number of tiles), MORE, APART, TOGETHER (of
// one wave alone), NORM, GATED, RESIDUAL, BIAS, WIDE (out is float32).

constexpr int SPLITS[] = {SPLIT_LIST};
constexpr int FIRSTS[] = {FIRST_LIST};
#define PANEL_BYTES 8192  // 64 rows of the weight, 64 k
#define X_BYTES (ROWS * 128)
#define STAGE_BYTES (PANELS * (2 * PANEL_BYTES + X_BYTES))
#define PANELS_OF_K ((K + 63) / 64)
#define EIGHTS (ROWS / 8)
#define COMPUTING 256  // threads
#define TELLING 96
#define WIDTH (GATED ? N / 2 : N)
#define CHUNK 2  // eights of rows that four warps write at a time
#define CHUNKS ((EIGHTS + CHUNK - 1) / CHUNK)
#define PITCH 68
#define BUFFER (CHUNK * 8 * PITCH)  // floats
#define AHEAD (ROWS <= 64 ? CHUNKS : 1)
#define LEFT_BY_ONE (ROWS * 32)  // float4 that a block leaves of a tile

// Keeps what is read once from driving out what is read by all.
#define ONCE 0x12F0000000000000ull
#define OFTEN 0x14F0000000000000ull

__device__ constexpr bool some_split(int split) {
    for (int each : SPLITS)
        if (each == split) return true;
    return false;
}
__device__ constexpr int most_split() {
    int most = 1;
    for (int each : SPLITS) most = each > most ? each : most;
    return most;
}
constexpr int MOST_SPLIT = most_split();
constexpr bool USES_SCALES = NORM && (!APART || TOGETHER || some_split(1));

// The first panel of a slice.
__device__ __forceinline__ int first_of(int slice, int split) {
    if (slice == split) return PANELS_OF_K;
    return (slice * (PANELS_OF_K - (split > 1 ? MORE : 0)) + split) / (2 * split) * 2;
}

struct Work {
    int split, slice, tile, slot;
    __device__ __forceinline__ Work(int wave) {
        split = SPLITS[wave], slice = blockIdx.x % split, slot = blockIdx.x - slice;
        tile = FIRSTS[wave] + blockIdx.x / split;
        if (tile >= FIRSTS[wave + 1]) tile = -1;
    }
};

// 64 columns of x; of the weight, 64 rows of them.
__device__ __forceinline__ void copy_box(void* to, const Map* map, int column, int row, u64* landed,
                                         u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(address(to)), "l"(map),
                 "r"(column), "r"(row), "r"(address(landed)), "l"(policy) : "memory");
}

// 32 rows of each half of the weight, in eights.
__device__ __forceinline__ void copy_both(void* to, const Map* map, int column, int eight,
                                          u64* landed, u64 policy) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 ".L2::cache_hint [%0], [%1, {%2, %3, %3, %4}], [%5], %6;" ::"r"(address(to)),
                 "l"(map), "r"(column), "r"(0), "r"(eight), "r"(address(landed)), "l"(policy)
                 : "memory");
}

#define RUN(n, regs, a, b) \
    "{.reg .pred p; setp.eq.b32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #n \
    "k16.f32.bf16.bf16 {" regs "}, " a ", " b ", p, 1, 1, 0, 0;}"
#define IN_4 "%0, %1, %2, %3"
#define IN_8 IN_4 ", %4, %5, %6, %7"
#define IN_128 IN_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
    "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, " \
    "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define SIXTY_FOUR(c, i) SIXTEEN(c, i), SIXTEEN(c, i + 4), SIXTEEN(c, i + 8), SIXTEEN(c, i + 12)

// c [COUNT eights of rows, from FROM on] += weight * x, 16 of k.
template <int COUNT, int FROM> __device__ __forceinline__ void multiply_eights(
    float (&c)[EIGHTS][4], u64 w, u64 x) {
    if constexpr (COUNT >= 32) {
        asm volatile(RUN(256, IN_128, "%128", "%129")
                     : SIXTY_FOUR(c, FROM), SIXTY_FOUR(c, FROM + 16) : "l"(w), "l"(x));
        multiply_eights<COUNT - 32, FROM + 32>(c, w, x + 32 * 64);
    } else if constexpr (COUNT >= 16) {
        asm volatile(RUN(128, IN_64, "%64", "%65") : SIXTY_FOUR(c, FROM) : "l"(w), "l"(x));
        multiply_eights<COUNT - 16, FROM + 16>(c, w, x + 16 * 64);
    } else if constexpr (COUNT >= 8) {
        asm volatile(RUN(64, IN_32, "%32", "%33")
                     : SIXTEEN(c, FROM), SIXTEEN(c, FROM + 4) : "l"(w), "l"(x));
        multiply_eights<COUNT - 8, FROM + 8>(c, w, x + 8 * 64);
    } else if constexpr (COUNT >= 4) {
        asm volatile(RUN(32, IN_16, "%16", "%17") : SIXTEEN(c, FROM) : "l"(w), "l"(x));
        multiply_eights<COUNT - 4, FROM + 4>(c, w, x + 4 * 64);
    } else if constexpr (COUNT >= 2) {
        asm volatile(RUN(16, IN_8, "%8", "%9")
                     : FOUR(c, FROM), FOUR(c, FROM + 1) : "l"(w), "l"(x));
        multiply_eights<COUNT - 2, FROM + 2>(c, w, x + 2 * 64);
    } else if constexpr (COUNT == 1) {
        asm volatile(RUN(8, IN_4, "%4", "%5") : FOUR(c, FROM) : "l"(w), "l"(x));
    }
}

// All but those that were begun last are over.
__device__ __forceinline__ void wait_for_earlier_products() {
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
}

// Barriers of some warps: the four of half a tile, and those that have something to tell.
__device__ __forceinline__ void meet(int half) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + half) : "memory");
}
enum { NEARLY_DONE = 3, LEFT, TOLD, TOLD_SCALES };
__device__ __forceinline__ void give_word(int barrier, int threads = COMPUTING + 32) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void wait_for_word(int barrier, int threads = COMPUTING + 32) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// How many blocks have left their part of a tile: with this one, and without.
__device__ __forceinline__ int come(int* counter) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before) : "l"(counter) : "memory");
    return before;
}
__device__ __forceinline__ int seen(int* counter) {
    int now;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
    return now;
}

// Scales of COUNT rows, APART_BY from each other, by 8 threads, one of which is to write them.
template <int COUNT, int APART_BY> __device__ __forceinline__ void find_scales(
    float* scales, const float* squares, int row, int lane, float eps) {
    float sums[COUNT] = {};
#pragma unroll 4
    for (int t = lane % 8; t < PANELS_OF_K; t += 8)
#pragma unroll
        for (int r = 0; r < COUNT; r++)
            if (row + r * APART_BY < ROWS) sums[r] += __ldcg(squares + t * ROWS + row + r * APART_BY);
#pragma unroll
    for (int r = 0; r < COUNT; r++) {
        float sum = sums[r];
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        if (row + r * APART_BY < ROWS && lane % 8 == 0)
            scales[row + r * APART_BY] = rsqrtf(sum * (1.f / K) + eps);
    }
}

struct Told {
    const u16* bias;
    const u16* residual;     // [rows][N]
    void* out;
    const uint4* next_norm;  // [N]
    u16* next_x;             // [rows][N]
    float* next_squares;     // [N / 64][ROWS]
    int rows;
};

// Sums of COUNT eights of rows, from registers to where they belong.
template <int COUNT> __device__ __forceinline__ void write_rows(
    const Told& told, const float (&c)[COUNT][4], int tile, int half, int first_row,
    const float* scales) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    const int column = (tile * 2 + half) * (GATED ? 32 : 64) + warp * (GATED ? 8 : 16) + lane / 4;
    if (column >= WIDTH) return;  // all of a warp
#if BIAS
    const float lower = low(told.bias[column]), upper = low(told.bias[column + (GATED ? N / 2 : 8)]);
#endif
    [[maybe_unused]] const bool odd = lane / 4 % 2;
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
        const int row = first_row + e * 8 + lane % 4 * 2;
        float a[2] = {c[e][0], c[e][1]}, b[2] = {c[e][2], c[e][3]};
#if NORM
        const float2 scale = *(const float2*)(scales + row);
        a[0] *= scale.x, a[1] *= scale.y, b[0] *= scale.x, b[1] *= scale.y;
#endif
#if BIAS
        a[0] += lower, a[1] += lower, b[0] += upper, b[1] += upper;
#endif
#if WIDE
        float* to = (float*)told.out + (long)row * WIDTH + column;
        if (row < told.rows) to[0] = a[0], to[8] = b[0];
        if (row + 1 < told.rows) to[WIDTH] = a[1], to[WIDTH + 8] = b[1];
#else
        // Neighbours exchange: one writes two columns of this row, the other of the next.
        u16* to = (u16*)told.out + (long)(row + odd) * WIDTH + column - odd;
#if GATED
#pragma unroll
        for (int j = 0; j < 2; j++) a[j] = __fdividef(a[j], 1.f + __expf(-a[j])) * b[j];
#endif
        const float from_a = __shfl_xor_sync(0xffffffffu, odd ? a[0] : a[1], 4);
        if (row + odd < told.rows) *(u32*)to = odd ? pack(from_a, a[1]) : pack(a[0], from_a);
#if !GATED
        const float from_b = __shfl_xor_sync(0xffffffffu, odd ? b[0] : b[1], 4);
        if (row + odd < told.rows) *(u32*)(to + 8) = odd ? pack(from_b, b[1]) : pack(b[0], from_b);
#endif
#endif
    }
}

// Onto the hidden states, through shared memory: a thread has 8 outputs of a row of the chunk.

__device__ __forceinline__ int row_of() { return threadIdx.x % 128 / 8; }
__device__ __forceinline__ int column_of(int tile, int half) {
    return (tile * 2 + half) * 64 + threadIdx.x % 8 * 8;
}
__device__ __forceinline__ uint4 residual_of(const Told& told, int row, int column) {
    if (row >= told.rows || column >= N) return make_uint4(0, 0, 0, 0);
    return __ldcg((const uint4*)(told.residual + (long)row * N + column));
}
__device__ __forceinline__ uint4 norm_of(const Told& told, int column) {
    return column < N ? __ldg(told.next_norm + column / 8) : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void write_chunk(const Told& told, const float (&c)[CHUNK][4], int tile,
                                            int half, int first_row, float* buffer, uint4 residual,
                                            uint4 norm) {
    const int lane = threadIdx.x % 32, m = threadIdx.x % 128 / 32 * 16 + lane / 4;
#pragma unroll
    for (int e = 0; e < CHUNK; e++)
#pragma unroll
        for (int j = 0; j < 4; j++)
            buffer[(e * 8 + lane % 4 * 2 + j % 2) * PITCH + m + j / 2 * 8] = c[e][j];
    meet(half);
    const int row = first_row + row_of(), column = column_of(tile, half);
    const float4* from = (const float4*)(buffer + row_of() * PITCH + threadIdx.x % 8 * 8);
    const float4 first = from[0], second = from[1];
    float v[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
    const bool inside = row < told.rows && column < N;
#if BIAS
    if (inside) {
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += low(told.bias[column + i]);
    }
#endif
    const uint4 r = residual;
    v[0] += low(r.x), v[1] += high(r.x), v[2] += low(r.y), v[3] += high(r.y);
    v[4] += low(r.z), v[5] += high(r.z), v[6] += low(r.w), v[7] += high(r.w);
    const uint4 o = make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
    float s = low(o.x) * low(o.x) + high(o.x) * high(o.x);
    s += low(o.y) * low(o.y) + high(o.y) * high(o.y);
    s += low(o.z) * low(o.z) + high(o.z) * high(o.z);
    s += low(o.w) * low(o.w) + high(o.w) * high(o.w);
    if (!inside) s = 0.f;
#pragma unroll
    for (int d = 4; d > 0; d /= 2) s += __shfl_xor_sync(0xffffffffu, s, d);
    if (inside) {
        const long at = (long)row * N + column;
        *(uint4*)((u16*)told.out + at) = o;
        *(uint4*)(told.next_x + at) = make_uint4(weighted(o.x, norm.x), weighted(o.y, norm.y),
                                                 weighted(o.z, norm.z), weighted(o.w, norm.w));
        if (threadIdx.x % 8 == 0) told.next_squares[(tile * 2 + half) * ROWS + row] = s;
    }
}

// Sums of slices, by twos, and twos of these.
template <int SPLIT, int COUNT> __device__ __forceinline__ void add_slices_of(
    float (&c)[COUNT][4], float4 (&there)[SPLIT][COUNT]) {
#pragma unroll
    for (int apart = 1; apart < SPLIT; apart *= 2)
#pragma unroll
        for (int b = 0; b + apart < SPLIT; b += 2 * apart)
#pragma unroll
            for (int e = 0; e < COUNT; e++) {
                float4 &to = there[b][e], &from = there[b + apart][e];
                to.x += from.x, to.y += from.y, to.z += from.z, to.w += from.w;
            }
#pragma unroll
    for (int e = 0; e < COUNT; e++) {
        const float4 sum = there[0][e];
        c[e][0] = sum.x, c[e][1] = sum.y, c[e][2] = sum.z, c[e][3] = sum.w;
    }
}

__device__ __forceinline__ float4 four(const float (&c)[4]) {
    return make_float4(c[0], c[1], c[2], c[3]);
}

// What SPLIT blocks have left of COUNT eights; what is this one's own it has itself.
template <int SPLIT, int COUNT> __device__ __forceinline__ void add_up(
    float (&c)[COUNT][4], const float4* left, int own) {
    float4 there[SPLIT][COUNT];
#pragma unroll
    for (int b = 0; b < SPLIT; b++)
#pragma unroll
        for (int e = 0; e < COUNT; e++)
            there[b][e] = b == own ? four(c[e]) : __ldcg(left + (long)b * LEFT_BY_ONE + e * COMPUTING);
    add_slices_of(c, there);
}
template <int SPLIT, int TOTAL, int FROM> __device__ __forceinline__ void add_groups(
    float (&c)[TOTAL][4], const float4* left, int own) {
    if constexpr (FROM < TOTAL) {
        constexpr int most = 16 / SPLIT, count = TOTAL - FROM < most ? TOTAL - FROM : most;
        add_up<SPLIT, count>(*(float (*)[count][4])(c + FROM), left + FROM * COMPUTING, own);
        add_groups<SPLIT, TOTAL, FROM + count>(c, left, own);
    }
}
template <int SPLIT, int TOTAL> __device__ __forceinline__ void add_all(
    float (&c)[TOTAL][4], const float4* left, int split, int own) {
    if constexpr (SPLIT > 1 && some_split(SPLIT))
        if (split == SPLIT) return add_groups<SPLIT, TOTAL, 0>(c, left, own);
    if constexpr (SPLIT > 2) add_all<SPLIT - 1>(c, left, split, own);
}

#if TOGETHER
constexpr int BLOCKS = SPLITS[0], SHARE = (CHUNKS + BLOCKS - 1) / BLOCKS;  // chunks of a block
static_assert(WAVES == 1 && BLOCKS * SHARE * CHUNK * COMPUTING * 16 <= STAGES * STAGE_BYTES);

__device__ __forceinline__ void put_there(u32 where, float4 v) {
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(where), "f"(v.x),
                 "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// Where a block finds what another one, or itself, has of a chunk of its rows.
__device__ __forceinline__ float4* place_of(char* room, int from, int chunk) {
    const int share = chunk / BLOCKS;
    return (float4*)room + (from * SHARE + share) * CHUNK * COMPUTING + threadIdx.x;
}

// Chunks are dealt out to the blocks of the cluster. The room is where weights have landed before.
__device__ __forceinline__ void share_out(const float (&c)[EIGHTS][4], char* room, int own) {
    arrive(), wait_for_all();  // all weights were multiplied
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
        const u32 where = address(place_of(room, own, j));
#pragma unroll
        for (int e = 0; e < CHUNK; e++)
            if (j % BLOCKS != own)
                put_there(of_block(where + e * COMPUTING * 16, j % BLOCKS), four(c[j * CHUNK + e]));
    }
    arrive(), wait_for_all();
}

__device__ __forceinline__ void add_chunk(float (&c)[CHUNK][4], char* room, int own, int chunk) {
    float4 there[BLOCKS][CHUNK];
#pragma unroll
    for (int b = 0; b < BLOCKS; b++)
#pragma unroll
        for (int e = 0; e < CHUNK; e++)
            there[b][e] = b == own ? four(c[e]) : place_of(room, b, chunk)[e * COMPUTING];
    add_slices_of(c, there);
}
#endif

extern "C" __global__ void __launch_bounds__(COMPUTING + 32 + TELLING, 1)
streamed_product(const __grid_constant__ Map weight, const __grid_constant__ Map xs, float4* left,
                 int* have_come, const float* squares, const u16* bias, const u16* residual,
                 void* out, const uint4* next_norm, u16* next_x, float* next_squares, float eps,
                 int rows) {
    extern __shared__ __align__(1024) uint4 shared[];
    char* stages = (char*)shared;
    float* buffers = (float*)(stages + STAGES * STAGE_BYTES);  // of each half, two
    float* scales = buffers + (RESIDUAL ? 4 * BUFFER : 0);
    u64* full = (u64*)(scales + ROWS);
    u64* empty = full + STAGES;
    int* before = (int*)(empty + STAGES);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            make_landing(full + s, 1);
            make_landing(empty + s, COMPUTING / 32);
        }
        show_landings();
    }
    if (threadIdx.x == COMPUTING) look_at(&weight), look_at(&xs);
    __syncthreads();
    let_next_begin();

    if (warp == COMPUTING / 32) {  // asks
        int i = 0, places[STAGES];
        bool waited = false;
        auto bring_x = [&](int stage, int panel) {
            if (lane > 0) return;
            char* to = stages + stage * STAGE_BYTES + PANELS * 2 * PANEL_BYTES;
#pragma unroll
            for (int p = 0; p < PANELS; p++)
                copy_box(to + p * X_BYTES, &xs, (panel + p) * 64, 0, full + stage, OFTEN);
        };
        // The weight is there before what x is computed from.
        auto bring_all_x = [&](int count) {
            wait_for_previous();
            waited = true;
#pragma unroll
            for (int j = 0; j < STAGES; j++)
                if (j < count) bring_x(j, places[j]);
        };
#pragma unroll 1
        for (int w = 0; w < WAVES; w++) {
            const Work work(w);
            if (work.tile < 0) continue;
            const int end = first_of(work.slice + 1, work.split);
#pragma unroll 1
            for (int panel = first_of(work.slice, work.split); panel < end; panel += PANELS, i++) {
                const int s = i % STAGES;
                if (i == STAGES) bring_all_x(STAGES);
                if (i >= STAGES) wait_for_landing(empty + s, i / STAGES - 1 & 1);
                if (lane == 0) {
                    expect(full + s, STAGE_BYTES);
#pragma unroll
                    for (int p = 0; p < PANELS; p++)
#pragma unroll
                        for (int h = 0; h < 2; h++) {
                            char* to = stages + s * STAGE_BYTES + (p * 2 + h) * PANEL_BYTES;
                            const int k = (panel + p) * 64, row = work.tile * 128 + h * 64;
#if GATED
                            copy_both(to, &weight, k, row / 16, full + s, ONCE);
#else
                            copy_box(to, &weight, k, row, full + s, ONCE);
#endif
                        }
                }
                if (waited) {
                    bring_x(s, panel);
                } else {
#pragma unroll
                    for (int j = 0; j < STAGES; j++)
                        if (j == s) places[j] = panel;
                }
            }
        }
        if (!waited) bring_all_x(i);
        return;
    }

    if (warp > COMPUTING / 32) {
        if (USES_SCALES) {
            wait_for_previous();
            constexpr int apart_by = TELLING / 8, at_once = 6;
            const int own = (threadIdx.x - COMPUTING - 32) / 8;
#pragma unroll 1
            for (int first = 0; first < ROWS; first += apart_by * at_once)
                find_scales<at_once, apart_by>(scales, squares, first + own, lane, eps);
            give_word(TOLD_SCALES, COMPUTING + TELLING);
        }
        if (warp > COMPUTING / 32 + 1 || APART) return;
        // One tells blocks of each other.
#pragma unroll 1
        for (int w = 0; w < WAVES; w++) {
            const Work work(w);
            if (work.tile < 0 || work.split == 1) continue;
            int* counter = have_come + work.tile;
            const int others = work.split - 1;
            if (work.slice == others) {
                wait_for_word(NEARLY_DONE);
                if (lane == 0) *before = seen(counter);
                __syncwarp();
                const bool all = *before == others;
                if (all && lane == 0) *counter = 0;
                give_word(TOLD);
                if (all) continue;
            }
            wait_for_word(LEFT);
            if (lane == 0) {
                *before = come(counter);
                if (*before == others) *counter = 0;
            }
            __syncwarp();
            give_word(TOLD);
        }
        return;
    }

    wait_for_previous();
    const Told told = {bias, residual, out, next_norm, next_x, next_squares, rows};
    const int half = warp / 4;
    int i = 0;
    bool has_scales = false;
    float c[EIGHTS][4];
#pragma unroll 1
    for (int w = 0; w < WAVES; w++) {
        const Work work(w);
        if (work.tile < 0) continue;
        const bool is_last = !APART && work.split > 1 && work.slice == work.split - 1;
        const int panels = first_of(work.slice + 1, work.split) - first_of(work.slice, work.split);
        const int count = (panels + PANELS - 1) / PANELS;
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.f;
#pragma unroll 1
        for (int u = 0; u < count; u++, i++) {
            const int s = i % STAGES;
            if (is_last && u == count - 1) give_word(NEARLY_DONE);
            wait_for_landing(full + s, i / STAGES & 1);
            begin_products();
            const char* here = stages + s * STAGE_BYTES;
#pragma unroll
            for (int p = 0; p < PANELS; p++) {
                const u64 mine = operand(here + (p * 2 + half) * PANEL_BYTES, 16);
                const u64 x = operand(here + PANELS * 2 * PANEL_BYTES + p * X_BYTES, 16);
#pragma unroll
                for (int j = 0; j < 4; j++) multiply_eights<EIGHTS, 0>(c, mine + 2 * j, x + 2 * j);
            }
            end_products();
            if (u > 0) {
                wait_for_earlier_products();
                if (lane == 0) arrive_at(empty + (i - 1) % STAGES);
            }
        }
        wait_for_products();
        if (lane == 0) arrive_at(empty + (i - 1) % STAGES);
        if (USES_SCALES && !has_scales) {
            wait_for_word(TOLD_SCALES, COMPUTING + TELLING);
            has_scales = true;
        }
#if RESIDUAL
        const int column = column_of(work.tile, half);
        const uint4 norm = norm_of(told, column);
#endif
#if TOGETHER
#if RESIDUAL
        uint4 ahead[SHARE];
#pragma unroll
        for (int j = 0; j < SHARE; j++)
            ahead[j] = residual_of(told, (j * BLOCKS + work.slice) * CHUNK * 8 + row_of(), column);
#endif
        share_out(c, stages, work.slice);
#else
        if (work.split > 1) {
            const long slot = (long)w * gridDim.x + work.slot;
            float4* lies = left + slot * LEFT_BY_ONE + threadIdx.x;
            bool adds = false;
            if (is_last) {
                wait_for_word(TOLD);
                adds = *before == work.split - 1;
            }
            if (!adds) {  // the last one that comes does
                float4* mine = lies + work.slice * LEFT_BY_ONE;
#pragma unroll
                for (int e = 0; e < EIGHTS; e++)
                    __stcg(mine + e * COMPUTING, four(c[e]));
                if (APART) continue;
                give_word(LEFT);
                wait_for_word(TOLD);
                if (*before != work.split - 1) continue;
            }
            if (!APART) add_all<MOST_SPLIT>(c, lies, work.split, work.slice);
        }
#if RESIDUAL
        uint4 ahead[AHEAD];
#pragma unroll
        for (int j = 0; j < AHEAD; j++)
            ahead[j] = residual_of(told, j * CHUNK * 8 + row_of(), column);
#endif
#endif
#if RESIDUAL || TOGETHER
        [[maybe_unused]] int written = 0;
#pragma unroll
        for (int j = 0; j < CHUNKS; j++) {
            float these[CHUNK][4];
#pragma unroll
            for (int e = 0; e < CHUNK; e++)
#pragma unroll
                for (int v = 0; v < 4; v++) {
                    constexpr int most = EIGHTS - 1;
                    these[e][v] = c[j * CHUNK + e < most ? j * CHUNK + e : most][v];
                }
            const int row = j * CHUNK * 8;
#if TOGETHER
            if (j % BLOCKS != work.slice) continue;
            add_chunk(these, stages, work.slice, j);
#endif
#if RESIDUAL
            uint4 r;
            if constexpr (TOGETHER)
                r = ahead[j / MOST_SPLIT];
            else
                r = AHEAD < CHUNKS ? residual_of(told, row + row_of(), column) : ahead[j % AHEAD];
            float* buffer = buffers + (half * 2 + written++ % 2) * BUFFER;
            write_chunk(told, these, work.tile, half, row, buffer, r, norm);
#else
            write_rows<CHUNK>(told, these, work.tile, half, row, scales);
#endif
        }
#if RESIDUAL
        if (written % 2) meet(half);
#endif
#else
        write_rows<EIGHTS>(told, c, work.tile, half, 0, scales);
#endif
    }
}

// Of tiles that several blocks have slices of, where rows are many: 16 rows of one.
extern "C" __global__ void __launch_bounds__(COMPUTING)
add_slices(const float4* left, const float* squares, const u16* bias, const u16* residual, void* out,
           const uint4* next_norm, u16* next_x, float* next_squares, float eps, int rows, int grid) {
    extern __shared__ __align__(1024) uint4 shared[];
    const Told told = {bias, residual, out, next_norm, next_x, next_squares, rows};
    let_next_begin();
    int wave = 0;
    while (wave + 1 < WAVES && (int)blockIdx.x >= FIRSTS[wave + 1]) wave++;
    const int tile = blockIdx.x, split = SPLITS[wave], half = threadIdx.x / 128;
    const int first_row = blockIdx.y * CHUNK * 8;
    const long slot = (long)wave * grid + (tile - FIRSTS[wave]) * split;
    const float4* lies = left + slot * LEFT_BY_ONE + first_row / 8 * COMPUTING + threadIdx.x;
    float c[CHUNK][4];
#if RESIDUAL
    float* buffer = (float*)shared + half * BUFFER;
    const int column = column_of(tile, half);
    const uint4 norm = norm_of(told, column);
    wait_for_previous();
    const uint4 r = residual_of(told, first_row + row_of(), column);
    add_all<MOST_SPLIT>(c, lies, split, -1);
    write_chunk(told, c, tile, half, first_row, buffer, r, norm);
#else
    float* scales = (float*)shared;
    wait_for_previous();
#if NORM
    if (threadIdx.x < CHUNK * 64)
        find_scales<1, 0>(scales, squares, first_row + threadIdx.x / 8, threadIdx.x % 32, eps);
#endif
    add_all<MOST_SPLIT>(c, lies, split, -1);
    __syncthreads();
    write_rows<CHUNK>(told, c, tile, half, first_row, scales);
#endif
}
