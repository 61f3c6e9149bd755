// A few rows times a weight matrix that is read once, its work divided evenly among all blocks.
//
// out[r][n] = sum_k x[r][k] * w[n][k]; x [COLUMNS][K], w [N][K] in bf16, sums in float32.
//
// For long k and few outputs. A unit is what the warps of a block multiply at a time: 16 weight rows
// times a stretch of k. Blocks take equal ranges of all units, in the order of tiles; a tile that
// ends in another block's range is completed by the block that began it: the others leave it their
// sums. A block begins with what is left of another's tile and ends with the beginning of its own
// last one, so that what it must wait for was done long before.
//
// Everything is added in a fixed order: a row's result depends on that row and on nothing else.
//
// Compiled for one shape: N, K, OCTETS (of x rows), WARPS, UNROLL (of 32 k), GRID (blocks: no more
// than can run at the same time, because they wait for each other) and
//   RESIDUAL  out = residual + product
//   BIAS      out += bias

#define COLUMNS (OCTETS * 8)
#define SHARES (K / (32 * UNROLL))  // of a tile's k, each is what a warp multiplies at a time
#define UNITS ((SHARES + WARPS - 1) / WARPS)  // of a tile
#define TOTAL ((long)(N / 16) * UNITS)
#define OUTPUTS (COLUMNS * 16)  // of a tile

__device__ __forceinline__ void load(uint4 (&a)[UNROLL][2], const uint4* w, int tile, int share,
                                     int g, int t) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            a[u][h] = share < SHARES ? stream(w + ((long)tile * 16 + g + 8 * h) * (K / 8) +
                                              (share * UNROLL + u) * 4 + t)
                                     : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void wait_for_word(const int* word) {
    int there;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(there) : "l"(word) : "memory");
    while (!there);
}

__device__ __forceinline__ void set_word(int* word) {
    asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(word) : "memory");
}

__device__ __forceinline__ int first_unit(int block) { return (int)(block * TOTAL / GRID); }

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
few_rows_balanced(const uint4* __restrict__ w, const uint4* x, const u16* residual,
                  const u16* __restrict__ bias, u16* out, float* left, int* is_left, int rows) {
    __shared__ float sums[WARPS][COLUMNS][17];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int begin = first_unit(blockIdx.x), end = first_unit(blockIdx.x + 1);
    int tile = begin / UNITS, unit = begin % UNITS;
    float c[OCTETS][4] = {};
    uint4 a[UNROLL][2], next[UNROLL][2];

    load(a, w, tile, unit * WARPS + warp, g, t);
    let_next_begin();
    wait_for_previous();

#pragma unroll 1
    for (int at = begin; at < end; at++) {
        const int share = unit * WARPS + warp;
        uint4 b[OCTETS][UNROLL];
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                b[o][u] = share < SHARES
                              ? __ldcg(x + (long)(o * 8 + g) * (K / 8) + (share * UNROLL + u) * 4 + t)
                              : make_uint4(0, 0, 0, 0);
        const bool ends = unit == UNITS - 1;
        const int next_tile = ends ? tile + 1 : tile, next_unit = ends ? 0 : unit + 1;
        if (at + 1 < end) load(next, w, next_tile, next_unit * WARPS + warp, g, t);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int o = 0; o < OCTETS; o++) {
                multiply(c[o], a[u][0].x, a[u][1].x, a[u][0].y, a[u][1].y, b[o][u].x, b[o][u].y);
                multiply(c[o], a[u][0].z, a[u][1].z, a[u][0].w, a[u][1].w, b[o][u].z, b[o][u].w);
            }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) a[u][0] = next[u][0], a[u][1] = next[u][1];

        if (ends || at + 1 == end) {
#pragma unroll
            for (int o = 0; o < OCTETS; o++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    sums[warp][o * 8 + 2 * t + j % 2][g + j / 2 * 8] = c[o][j];
                    c[o][j] = 0.f;
                }
            __syncthreads();
            const bool mine = tile * UNITS >= begin;
            // Blocks that have the rest of a tile which this one began.
            int helpers = 0;
            if (mine && !ends)
                do helpers++;
                while (first_unit(blockIdx.x + helpers + 1) < (tile + 1) * UNITS);
            if (threadIdx.x < helpers) wait_for_word(is_left + blockIdx.x + 1 + threadIdx.x);
            if (helpers) __syncthreads();
#pragma unroll 1
            for (int e = threadIdx.x; e < OUTPUTS; e += WARPS * 32) {
                const int row = e / 16, m = e % 16;
                float value = 0.f;
#pragma unroll
                for (int v = 0; v < WARPS; v++) value += sums[v][row][m];
                if (!mine) {
                    left[(long)blockIdx.x * OUTPUTS + e] = value;
                    continue;
                }
#pragma unroll 1
                for (int i = 1; i <= helpers; i++)
                    value += __ldcg(left + (long)(blockIdx.x + i) * OUTPUTS + e);
                if (row >= rows) continue;
                const long column = (long)tile * 16 + m;
#if BIAS
                value += __uint_as_float((u32)bias[column] << 16);
#endif
#if RESIDUAL
                value += __uint_as_float((u32)residual[(long)row * N + column] << 16);
#endif
                out[(long)row * N + column] = (u16)(pack(value, 0.f) & 0xffffu);
            }
            if (!mine) __threadfence();
            __syncthreads();
            if (!mine && threadIdx.x == 0)
                set_word(is_left + blockIdx.x);
            if (threadIdx.x < helpers) is_left[blockIdx.x + 1 + threadIdx.x] = 0;
        }
        tile = next_tile, unit = next_unit;
    }
}
