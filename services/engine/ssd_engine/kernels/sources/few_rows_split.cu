// A few rows times a weight matrix that is read once, with x from the cache of the device.
//
// out[r][n] = sum_k x[r][k] * w[n][k]; x [COLUMNS][K], w [N][K] in bf16, sums in float32.
//
// For long k and few outputs: all warps of a block share its weight rows and divide k. The weight is
// the 16-row operand of mma.m16n8k16, eight rows of x the other. Lanes load 16 contiguous bytes
// straight into registers: which k goes to which place of the instruction does not matter as long
// as both operands agree. The warps' sums are added in a fixed order: a row's result depends on
// that row and on nothing else.
//
// Compiled for one shape: N, K, OCTETS (of x rows), TILES (of 16 weight rows per block), WARPS,
// UNROLL (of 32 k), BLOCKS (per multiprocessor) and
//   RESIDUAL  out = residual + product
//   BIAS      out += bias
//   AHEAD     the next weights are asked for before these are multiplied

#define COLUMNS (OCTETS * 8)
#define HEIGHT (TILES * 16)
#define SHARES (K / (32 * UNROLL))  // each is what a warp multiplies at a time
#define STEPS ((SHARES + WARPS - 1) / WARPS)
#define INSIDE(share) (SHARES % WARPS == 0 || (share) < SHARES)

__device__ __forceinline__ void load(uint4 (&a)[TILES][UNROLL][2], const uint4* w, int share, int g,
                                     int t) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const long row = ((long)blockIdx.x * TILES + i) * 16 + g + 8 * h;
                a[i][u][h] = INSIDE(share)
                                 ? stream(w + row * (K / 8) + (share * UNROLL + u) * 4 + t)
                                 : make_uint4(0, 0, 0, 0);
            }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
few_rows_split(const uint4* __restrict__ w, const uint4* x, const u16* residual,
               const u16* __restrict__ bias, u16* out, int rows) {
    __shared__ float sums[WARPS][COLUMNS][HEIGHT + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float c[TILES][OCTETS][4] = {};
    uint4 a[TILES][UNROLL][2];
#if AHEAD
    uint4 next[TILES][UNROLL][2];
#endif

    load(a, w, warp, g, t);
    let_next_begin();
    wait_for_previous();

#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
        const int share = step * WARPS + warp;
        uint4 b[OCTETS][UNROLL];
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
#pragma unroll
            for (int u = 0; u < UNROLL; u++)
                b[o][u] = INSIDE(share)
                              ? __ldcg(x + (long)(o * 8 + g) * (K / 8) + (share * UNROLL + u) * 4 + t)
                              : make_uint4(0, 0, 0, 0);
#if AHEAD
        if (step + 1 < STEPS) load(next, w, share + WARPS, g, t);
#endif
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int i = 0; i < TILES; i++)
#pragma unroll
                for (int o = 0; o < OCTETS; o++) {
                    multiply(c[i][o], a[i][u][0].x, a[i][u][1].x, a[i][u][0].y, a[i][u][1].y,
                             b[o][u].x, b[o][u].y);
                    multiply(c[i][o], a[i][u][0].z, a[i][u][1].z, a[i][u][0].w, a[i][u][1].w,
                             b[o][u].z, b[o][u].w);
                }
#if AHEAD
#pragma unroll
        for (int i = 0; i < TILES; i++)
#pragma unroll
            for (int u = 0; u < UNROLL; u++) {
                a[i][u][0] = next[i][u][0];
                a[i][u][1] = next[i][u][1];
            }
#else
        if (step + 1 < STEPS) load(a, w, share + WARPS, g, t);
#endif
    }

#pragma unroll
    for (int i = 0; i < TILES; i++)
#pragma unroll
        for (int o = 0; o < OCTETS; o++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                sums[warp][o * 8 + 2 * t + j % 2][i * 16 + g + j / 2 * 8] = c[i][o][j];
    __syncthreads();

    for (int e = threadIdx.x; e < COLUMNS * HEIGHT; e += WARPS * 32) {
        const int row = e / HEIGHT, m = e % HEIGHT;
        if (row >= rows) continue;
        const long column = (long)blockIdx.x * HEIGHT + m;
        float value = 0.f;
#pragma unroll
        for (int v = 0; v < WARPS; v++) value += sums[v][row][m];
#if BIAS
        value += __uint_as_float((u32)bias[column] << 16);
#endif
#if RESIDUAL
        value += __uint_as_float((u32)residual[(long)row * N + column] << 16);
#endif
        out[(long)row * N + column] = (u16)(pack(value, 0.f) & 0xffffu);
    }
}
