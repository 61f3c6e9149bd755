// A few rows times a weight matrix that is read once, its work divided evenly among all blocks.
//
// out[r][n] = sum_k x[r][k] * w[n][k]; x [COLUMNS][K], w [N][K] in bf16, sums in float32.
//
// For long k and few outputs. A unit is what the warps of a block multiply at a time: 16 weight rows
// times a stretch of k. Blocks take equal ranges of all units, in the order of tiles. Of a tile that
// lies in several ranges each block leaves its sums, and the last one that comes adds them up: no
// block ever waits for another, which may not have begun where a device is shared.
//
// Everything is added in a fixed order, that of k: a row's result depends on that row and on nothing
// else.
//
// Compiled for one shape: N, K, OCTETS (of x rows), WARPS, UNROLL (of 32 k), GRID (blocks) and
//   RESIDUAL  out = residual + product
//   BIAS      out += bias

#define COLUMNS (OCTETS * 8)
#define SHARES (K / (32 * UNROLL))  // of a tile's k, each is what a warp multiplies at a time
#define UNITS ((SHARES + WARPS - 1) / WARPS)  // of a tile
#define INSIDE(share) (SHARES % WARPS == 0 || (share) < SHARES)
#define TOTAL ((long)(N / 16) * UNITS)
#define OUTPUTS (COLUMNS * 16)  // of a tile

__device__ __forceinline__ void load(uint4 (&a)[UNROLL][2], const uint4* w, int tile, int share,
                                     int g, int t) {
#pragma unroll
    for (int u = 0; u < UNROLL; u++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            a[u][h] = INSIDE(share) ? stream(w + ((long)tile * 16 + g + 8 * h) * (K / 8) +
                                              (share * UNROLL + u) * 4 + t)
                                     : make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ int first_unit(int block) { return (int)(block * TOTAL / GRID); }
__device__ __forceinline__ int block_of(int unit) {
    return (int)(((unit + 1L) * GRID - 1) / TOTAL);
}
__device__ __forceinline__ int first_block(int tile) { return block_of(tile * UNITS); }
__device__ __forceinline__ int last_block(int tile) { return block_of(tile * UNITS + UNITS - 1); }

__device__ __forceinline__ void write(u16* out, const u16* residual, const u16* bias, int tile, int e,
                                      float value) {
    const long column = (long)tile * 16 + e % 16, at = (long)(e / 16) * N + column;
#if BIAS
    value += __uint_as_float((u32)bias[column] << 16);
#endif
#if RESIDUAL
    value += __uint_as_float((u32)residual[at] << 16);
#endif
    out[at] = (u16)(pack(value, 0.f) & 0xffffu);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
few_rows_balanced(const uint4* __restrict__ w, const uint4* x, const u16* residual,
                  const u16* __restrict__ bias, u16* out, float* left, int* have_come, int rows) {
    __shared__ float sums[WARPS][COLUMNS][17];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int begin = first_unit(blockIdx.x), end = first_unit(blockIdx.x + 1);
    int tile = begin / UNITS, unit = begin % UNITS;
    float c[OCTETS][4] = {};
    uint4 a[UNROLL][2], next[UNROLL][2];
    int at_first = 0, at_last = 0;  // blocks that came before this one to its first and last tile

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
                b[o][u] = INSIDE(share)
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
            const bool begun = tile * UNITS < begin;  // by another block
            const bool whole = ends && !begun;
            float* mine = left + ((long)blockIdx.x * 2 + !begun) * OUTPUTS;
#pragma unroll 1
            for (int e = threadIdx.x; e < OUTPUTS; e += WARPS * 32) {
                float value = 0.f;
#pragma unroll
                for (int v = 0; v < WARPS; v++) value += sums[v][e / 16][e % 16];
                if (!whole)
                    mine[e] = value;
                else if (e / 16 < rows)
                    write(out, residual, bias, tile, e, value);
            }
            __syncthreads();
            if (!whole && threadIdx.x == 0) {
                __threadfence();
                // What comes back is not looked at before the end: the first tile costs no wait.
                if (begun)
                    at_first = atomicAdd(have_come + tile, 1);
                else
                    at_last = atomicAdd(have_come + tile, 1);
            }
        }
        tile = next_tile, unit = next_unit;
    }

    // Sums of the first tile, which another block began, and of the last one, which another ends.
    const int edges[2] = {begin / UNITS, (end - 1) / UNITS};
    bool* adds = (bool*)sums;
    if (threadIdx.x == 0) {
        const bool begun = begin % UNITS != 0, leaves = end % UNITS && edges[1] * UNITS >= begin;
        adds[0] = begun && at_first == last_block(edges[0]) - first_block(edges[0]);
        adds[1] = leaves && at_last == last_block(edges[1]) - first_block(edges[1]);
        if (adds[0] || adds[1]) __threadfence();
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
        if (!adds[i]) continue;
        const int first = first_block(edges[i]), last = last_block(edges[i]);
        for (int e = threadIdx.x; e < OUTPUTS && e / 16 < rows; e += WARPS * 32) {
            float value = __ldcg(left + ((long)first * 2 + 1) * OUTPUTS + e);
#pragma unroll 1
            for (int block = first + 1; block <= last; block++)
                value += __ldcg(left + (long)block * 2 * OUTPUTS + e);
            write(out, residual, bias, edges[i], e, value);
        }
        if (threadIdx.x == 0) have_come[edges[i]] = 0;
    }
}
